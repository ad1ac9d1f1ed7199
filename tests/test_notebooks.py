"""The notebooks of docs/ run from top to bottom, and give what they show."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from wording import words

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))


def outputs_of(notebook):
    return [
        [(sorted(it), "text/html" in it or words(it["text/plain"])) for it in (output.data for output in cell.outputs)]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["first_look.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_gives_what_it_shows(path):
    notebook = nbformat.read(path, as_version=4)
    shown = outputs_of(notebook)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert outputs_of(notebook) == shown
    assert all(shown)
