"""The code shown in the documentation is run."""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import esper

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [p for p in sorted(ROOT.glob("docs/*.md")) if BLOCK.search(p.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_blocks_of_a_page_run_in_order(page):
    run("\n".join(BLOCK.findall(page.read_text())))


def test_readme_shows_the_example_and_the_example_runs():
    code = (ROOT / "examples" / "grow_one_model.py").read_text()
    shown = BLOCK.search((ROOT / "README.md").read_text())
    assert shown is not None
    assert shown.group(1) == code.split('"""', 2)[2].lstrip("\n")

    printed = run(code)

    assert printed.count("FOSSILIZED") == 2
    assert float(printed.split()[-1]) > 0.6


QUICKSTART = ["README.md", "examples/grow_one_model.py", "docs/graft.md", "docs/worth.md"]


@pytest.mark.parametrize("name", QUICKSTART)
def test_quickstart_imports_no_internal_module(name):
    text = (ROOT / name).read_text()
    code = text if name.endswith(".py") else "\n".join(BLOCK.findall(text))
    modules = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module)
    assert "esper" in modules
    assert [module for module in modules if module.startswith("esper.")] == []


def test_every_public_name_resolves():
    assert [name for name in esper.__all__ if getattr(esper, name, None) is None] == []


def run(code: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as place:  # examples write checkpoints and logs where they run
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=place)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["trainer", "lightning"])
def test_page_of_a_training_library_shows_its_example(name):
    """The test of code blocks runs it."""
    code = (ROOT / "examples" / f"grow_in_{name}.py").read_text()
    shown = BLOCK.search((ROOT / "docs" / f"{name}.md").read_text())
    assert shown is not None
    assert shown.group(1) == code.split('"""', 2)[2].lstrip("\n")
    assert len(code.splitlines()) <= 40
