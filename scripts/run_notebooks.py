"""Execute the notebooks of docs/notebooks and store their outputs.

    python scripts/run_notebooks.py

Execution counts and times are left out, so a notebook changes only where its content does.
Needs nbclient and ipykernel.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"


def executed(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with fresh outputs, executed in a temporary directory. Raise if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as place:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": place}}).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
            cell.execution_count = None
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = None
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def merged(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return the outputs with printed texts that follow each other as one: how they are cut depends on timing."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if kept and output.output_type == kept[-1].output_type == "stream" and output.name == kept[-1].name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(f"executed {path.name}")


if __name__ == "__main__":
    main()
