"""Two runs side by side: rows, headroom and relative error; and the source around an expression, as it is now."""

import linecache
import math

import pytest
from made_traces import INF, NAN, call, reference, stats, trace

from nandoctor.diagnosis.run_summary import align, read_excerpt, relative_error
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.evidence.trace import SourceLine


def test_rows_are_in_order_of_return_and_unfinished_ones_last():
    run = trace(call("", 0, None), call("a", 1, 4), call("a.b", 2, 3), call("c", 5, None), raised="stop")
    assert [row.place.module for row in align(run, reference(), FP16)] == ["a.b", "a", "", "c"]


def test_headroom_is_of_the_largest_output_in_the_low_format():
    run = trace(call("a", 0, 1, outputs=(stats(1.0), stats(-65504.0 / 4))), call("b", 2, 3, outputs=(stats(NAN),)))
    a, b = align(run, reference(), FP16)
    assert a.headroom_bits == pytest.approx(2.0)
    assert b.headroom_bits is None
    assert align(run, reference(), BF16)[0].headroom_bits > 100


@pytest.mark.parametrize(
    ("values", "others", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 9.0], [3.0, 4.0], 1.0),
        ([NAN, 4.0], [3.0, 2.0], 1.0),
        ([1.0, INF], [2.0, INF], 0.5),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], math.inf),
        ([NAN], [1.0], None),
        ([3e38], [1e38], 2.0),
        ([], [], None),
    ],
)
def test_the_relative_error_is_over_what_is_finite_in_both(values, others, expected):
    assert relative_error((stats(*values),), (stats(*others),)) == pytest.approx(expected)


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
def file(here):
    path = here / "net.py"
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
