"""Files of the other distribution called `esper` are detected, whichever was installed last."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

REPAIR = "pip uninstall -y esper esper-lite"


@pytest.fixture
def site(tmp_path):
    """Return a directory of installed packages with a copy of ours and the metadata of the other."""
    shutil.copytree(ROOT / "src" / "esper", tmp_path / "esper", ignore=shutil.ignore_patterns("__pycache__", "files"))
    (tmp_path / "esper-3.4.dist-info").mkdir()
    return tmp_path


def python(site, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, check=False)


def test_import_warns_if_the_other_distribution_is_installed_beside_ours(site):
    done = python(site, "-c", "import esper; print(esper.__version__)")
    assert done.returncode == 0
    assert "esper-3.4" in done.stderr
    assert REPAIR in done.stderr


def test_import_does_not_warn_alone(site):
    (site / "esper-3.4.dist-info").rename(site / "esper_lite-0.2.0.dist-info")
    assert python(site, "-W", "error", "-c", "import esper").returncode == 0


@pytest.mark.parametrize("entry", [("-m", "esper", "tasks"), ("-c", "import esper.lightning")])
def test_entry_points_refuse_if_the_other_replaced_our_files(site, entry):
    (site / "esper" / "__init__.py").write_text('"""Entities and components."""\n\n__version__ = "3.4"\n')
    done = python(site, *entry)
    assert done.returncode != 0
    assert "entity-component library" in done.stderr
    assert REPAIR in done.stderr
    if entry[0] == "-m":
        assert "Traceback" not in done.stderr
