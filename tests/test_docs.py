"""The code shown in the documentation is run."""

import ast
import os
import re
import sys
import tempfile
import types
from pathlib import Path

import pytest

import esper
from tests.support.fork_server import exit_codes, start

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [p for p in sorted([*ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md"]) if BLOCK.search(p.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_code_blocks_of_a_page_run_in_order(page):
    run("\n".join(BLOCK.findall(page.read_text())))


def test_readme_shows_the_example_and_the_example_runs():
    code = (ROOT / "examples" / "grow_one_model.py").read_text()
    short, whole = BLOCK.findall(README)
    assert whole == code.split('"""', 2)[2].lstrip("\n")
    assert len(short.splitlines()) == 5
    assert [line for line in short.splitlines() if line not in [each.strip() for each in code.splitlines()]] == []

    printed = run(code)

    assert printed.count("FOSSILIZED") == 2
    assert float(printed.split()[-1]) > 0.6
    listing = re.search(r"<!-- quickstart output: begin -->\n```text\n(.*?)```", README, re.DOTALL).group(1)
    kept = [
        line for line in printed.splitlines() if without_numbers(line) in map(without_numbers, listing.splitlines())
    ]
    assert [without_numbers(line) for line in kept] == [without_numbers(line) for line in listing.splitlines()]
    for ours, theirs in zip(numbers("\n".join(kept)), numbers(listing), strict=True):
        assert ours == pytest.approx(theirs, abs=0.1), "the output in the README is not that of the example"


def without_numbers(line: str) -> str:
    return re.sub(r"[+-]?\d+\.\d+", "#", line)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", text)]


INTERVAL = re.compile(r"[+−]?\d+\.\d+ (?:points )?\[[+−]?\d+\.\d+, [+−]?\d+\.\d+\]")


@pytest.mark.parametrize("page", ["README.md", "docs/when.md"])
def test_figures_on_when_to_grow_are_in_the_studies_that_they_name(page):
    """Every difference with an interval, in a row of the table that names studies, is in the tables of these."""
    table = (ROOT / page).read_text().split("<!-- when to grow: begin -->")[1].split("<!-- when to grow: end -->")[0]
    rows = [row for row in table.splitlines() if "studies/" in row]
    assert len(rows) >= 10
    for row in rows:
        pages = set(re.findall(r"\]\((?:docs/)?studies/(\w+\.md)\)", row))
        studies = "".join((ROOT / "docs" / "studies" / name).read_text() for name in pages)
        for interval in INTERVAL.findall(row):
            assert plain(interval) in plain(studies), f"{interval} is in none of the studies of its row: {row[:80]}"


def plain(text: str) -> str:
    return text.replace("points ", "").replace("+", "")


def test_first_screen_repeats_figures_of_the_table():
    first = README.split("## Quickstart")[0]
    table = README.split("<!-- when to grow: begin -->")[1]
    intervals = INTERVAL.findall(first)
    assert len(intervals) == 4
    for each in intervals:
        low = sorted(abs(float(number)) for number in re.findall(r"\d+\.\d+", each))
        ends = [sorted(abs(float(n)) for n in re.findall(r"\d+\.\d+", other)) for other in INTERVAL.findall(table)]
        assert low in ends, each


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
    """Run code as the main module of a new process, in an empty directory, and return what it prints."""
    with tempfile.TemporaryDirectory() as place:  # examples write checkpoints and logs where they run
        files = [Path(place) / name for name in ("directory", "stdout", "stderr")]
        files[0].mkdir()
        codes = exit_codes([start(run_as_main, code, *files)], timeout=600)
        assert codes == [0], files[2].read_text()
        return files[1].read_text()


def run_as_main(code: str, directory: Path, *outputs: Path) -> None:
    os.chdir(directory)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(code, "<page>", "exec"), main.__dict__)


@pytest.mark.parametrize("name", ["trainer", "lightning"])
def test_page_of_a_training_library_shows_its_example(name):
    """The test of code blocks runs it."""
    code = (ROOT / "examples" / f"grow_in_{name}.py").read_text()
    block = BLOCK.search((ROOT / "docs" / f"{name}.md").read_text())
    assert block is not None
    assert block.group(1) == code.split('"""', 2)[2].lstrip("\n")
    assert len(code.splitlines()) <= 40
