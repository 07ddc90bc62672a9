"""The notebooks run, and their stored outputs are those of the present code."""

import re

import nbformat
import pytest

from scripts.run_notebooks import NOTEBOOKS, executed
from tests.support.pages import page_id

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


def shape_of(notebook) -> list[tuple[str, str]]:
    """Return kind and text of every output, with numbers replaced, because they depend on the processor."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [
        (o.output_type, o.get("text") or o.get("data", {}).get("text/html") or o["data"]["text/plain"]) for o in outputs
    ]
    return [(kind, re.sub(r"[+−-]?\d[\d.,]*", "#", text)) for kind, text in texts]


def test_there_are_two_notebooks():
    assert [path.stem for path in PATHS] == ["compare_controllers", "quickstart"]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=page_id)
def test_notebook_runs_and_its_outputs_are_stored(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parents[1] / "src"))
    stored = nbformat.read(path, as_version=4)
    assert shape_of(executed(path)) == shape_of(stored), "run python scripts/run_notebooks.py"


def test_quickstart_shows_grower_report_and_worth_as_tables():
    (path,) = [path for path in PATHS if path.stem == "quickstart"]
    cells = nbformat.read(path, as_version=4).cells
    tables = [
        o.data["text/html"]
        for c in cells
        if c.cell_type == "code"
        for o in c.outputs
        if "text/html" in o.get("data", {})
    ]
    assert [caption for table in tables for caption in ("Grower", "Step", "dependence") if caption in table] == [
        "Grower", "Step", "Grower", "dependence",
    ]  # fmt: skip
