"""The built wheel: its content, and that it works in a fresh environment outside the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

import esper
from esper.nissa.run import manifest_base
from tests.support import ROOT

SOURCE = ROOT / "src" / "esper"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def package_files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_version_is_stated_once() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert ROOT / PROJECT["tool"]["hatch"]["version"]["path"] == SOURCE / "__init__.py"
    assert manifest_base()["versions"]["esper"] == esper.__version__
    stated = [path for path in SOURCE.rglob("*.py") if re.search(r"__version__ *=", path.read_text())]
    assert stated == [SOURCE / "__init__.py"]


def test_changelog_keeps_its_format_and_has_this_version() -> None:
    """As in Keep a Changelog: versions with dates, newest first, and the six kinds of changes."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    versions = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:]]
    assert [match.group(1) for match in versions if match] == [esper.__version__, "0.1.0"]
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}, "name kinds of changes only"


def test_workflow_tests_every_python_and_the_lowest_torch_by_the_ci_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    stated = [name.removeprefix(prefix) for name in PROJECT["project"]["classifiers"] if name.startswith(prefix)]
    assert matrix["python"] == [f"3.{minor}" for minor in stated]
    lowest = next(entry for entry in PROJECT["project"]["dependencies"] if entry.startswith("torch>="))
    assert matrix["torch"][0] == f"{lowest.removeprefix('torch>=')}.0"
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned.group(1) in matrix["torch"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert "make release-check" in [step.get("run") for step in workflow["jobs"]["release-check"]["steps"]]


def test_all_extra_names_every_extra_for_users() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    users = sorted(extras.keys() - {"all", "dev", "docs"})
    assert extras["all"] == [f"esper-lite[{','.join(users)}]"]
    assert "esper-lite[all]" in extras["dev"]
    named = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"esper-lite\[(\w+)\]", path.read_text())}
    assert named <= set(users)


def test_package_is_marked_as_typed() -> None:
    assert (SOURCE / "py.typed").read_bytes() == b""
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout[-1000:]} {done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fresh virtual environment with the built wheel; dependencies are those of the running one."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    wheels = list(folder.glob("*.whl"))
    assert [wheel.name for wheel in wheels] == [f"esper_lite-{esper.__version__}-py3-none-any.whl"]
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
    run(*pip, "--quiet", "--no-index", "--no-deps", wheels[0], cwd=folder)
    dependencies = [path for path in sys.path if Path(path).name == "site-packages"]
    (site_packages(environment) / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return environment


def site_packages(environment: Path) -> Path:
    paths = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(installed: Path) -> None:
    assert package_files(site_packages(installed) / "esper") == package_files(SOURCE)
    ours = {path.name for path in site_packages(installed).iterdir() if not path.name.startswith(("pip", "setuptools"))}
    info = f"esper_lite-{esper.__version__}.dist-info"
    assert ours - {"_distutils_hack", "distutils-precedence.pth", "pkg_resources", "__pycache__"} == {
        "esper", info, "dependencies.pth",
    }  # fmt: skip


@pytest.mark.slow
def test_installed_package_grows_reports_and_loads_its_policy(installed: Path, tmp_path: Path) -> None:
    python = installed / "bin" / "python"
    where = run(python, "-c", "import esper; print(esper.__version__, esper.__file__)", cwd=tmp_path)
    assert where.split() == [esper.__version__, str(site_packages(installed) / "esper" / "__init__.py")]

    short = ["grow", "--task", "digits", "--epochs", "2", "--no-compare"]
    run(installed / "bin" / "esper", *short, "--out", "by-entry-point", cwd=tmp_path)
    run(python, "-m", "esper", *short, "--controller", "tamiyo", "--out", "by-policy", cwd=tmp_path)
    run(installed / "bin" / "esper", "report", "by-policy", cwd=tmp_path)

    for name in ("by-entry-point", "by-policy"):
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert manifest["status"] == "finished"
        assert manifest["versions"]["esper"] == esper.__version__
    assert "<html" in (tmp_path / "by-policy" / "report.html").read_text()
