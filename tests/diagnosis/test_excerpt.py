"""The source around an expression, read from the file as it is now."""

import linecache

import pytest

from nandoctor.diagnosis.run_summary import read_excerpt
from nandoctor.evidence.trace import SourceLine

SOURCE = """import torch


class Norm(torch.nn.Module):
    @torch.no_grad()
    def forward(self, x):
\tdef inner(y):
\t\treturn (y
\t\t        / 2)
\treturn inner(x)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.py"
    path.write_text(SOURCE)
    linecache.checkcache()
    return path


def at(file, line, **columns):
    return SourceLine(file=str(file), line=line, text=SOURCE.splitlines()[line - 1].strip(), **columns)


def test_tabs_become_spaces_and_the_path_is_relative(file):
    made = read_excerpt(at(file, 8, column=10, end_line=9, end_column=13))
    assert (made.path, made.first, made.line, made.end_line) == ("net.py", 5, 8, 9)
    assert made.lines[3] == "        return (y"
    assert (made.lines[3][made.column :], made.lines[4][: made.end_column].strip()) == ("y", "/ 2")
    assert "\t" not in "".join(made.lines)


def test_the_function_is_named_as_python_names_it(file):
    file.write_text(SOURCE.replace("\t", "        "))
    linecache.checkcache()
    inner = read_excerpt(at(file, 8, column=16, end_line=9, end_column=21))
    assert (inner.function, inner.first, len(inner.lines)) == ("Norm.forward.inner", 7, 3)  # no line of another one
    assert read_excerpt(at(file, 10)).function == "Norm.forward"
    assert read_excerpt(at(file, 1)).function == ""


def test_a_file_that_changed_is_not_shown(file):
    gone = at(file, 8)
    file.write_text("something = else_\n" * 20)
    linecache.checkcache()
    assert read_excerpt(gone) is None
    file.unlink()
    linecache.checkcache()
    assert read_excerpt(gone) is None
