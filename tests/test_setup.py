"""What `make` installs, and that `make run` needs no more than that."""

import subprocess
import sys
import tomllib

import pytest

from tests.support import ROOT

CPU = "--extra-index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(("target", "installed"), [("run", '-e "."'), ("test", '-e ".[dev]"'), ("lint", '-e ".[dev]"')])
def test_make_run_installs_only_the_package_other_targets_the_dev_extra(tmp_path, target, installed):
    command = ["make", "-n", target, f"VENV={tmp_path / 'venv'}", f"PIP_ARGS={CPU}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (pip,) = [line for line in printed.splitlines() if "/bin/pip " in line]
    assert pip.endswith(f"-c constraints.txt {CPU} {installed}")


def test_another_version_of_torch_can_be_installed(tmp_path):
    command = ["make", "-n", "test", f"VENV={tmp_path / 'venv'}", "TORCH=2.10.0"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "sed 's/^torch==.*/torch==2.10.0/' constraints.txt > build/constraints-torch-2.10.0.txt" in printed
    assert "-c build/constraints-torch-2.10.0.txt" in printed


IMPORT_NAMES = {
    "mlflow-skinny": "mlflow", "myst-nb": "myst_nb", "pillow": "PIL", "pyspellchecker": "spellchecker",
    "pytest-xdist": "xdist", "sb3-contrib": "sb3_contrib",
}  # fmt: skip


def names_of_extras() -> set[str]:
    """Return the import names of every package that only an extra requires."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {entry.split(">=")[0] for entries in extras.values() for entry in entries if "[" not in entry}
    return {IMPORT_NAMES.get(package, package) for package in packages}


TINY = {
    "grow": ["--task", "digits", "--epochs", "4"],
    "train": ["--task", "digits", "--rounds", "1", "--envs", "2", "--epochs", "4", "--set", "ppo.minibatches=1"],
}


@pytest.mark.parametrize("command", TINY)
def test_grow_and_train_and_their_reports_need_no_optional_package(tmp_path, command):
    blocked = names_of_extras()
    assert {"transformers", "duckdb", "playwright", "PIL"} <= blocked
    code = f"""
import sys
sys.modules |= dict.fromkeys({sorted(blocked)!r})
from esper.cli import main
sys.exit(main())
"""
    tiny = [command, *TINY[command], "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", code, *tiny], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
