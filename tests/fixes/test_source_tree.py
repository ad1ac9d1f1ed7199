"""What a source file binds, and where its expressions stand."""

from __future__ import annotations

import libcst as cst
import pytest

from nandoctor.evidence.trace import SourceLine
from nandoctor.fixes.source_expression import negated
from nandoctor.fixes.source_imports import with_torch
from nandoctor.fixes.source_tree import Replacement, nodes_in, parse_source

TYPED = """from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def late():
    import math

    return math.pi
"""


def test_imports_for_type_checkers_and_functions_bind_nothing():
    tree = parse_source(TYPED)
    assert tree.imported_names == {"annotations", "TYPE_CHECKING", "torch", "math"}
    assert tree.global_imports == {"annotations", "TYPE_CHECKING"}
    assert "annotations\nimport torch\n" in with_torch(tree.text, TYPED + "\ntorch.zeros(1)\n")


def test_lines_are_counted_as_python_counts_them():
    tree = parse_source("\ufeff# \f one line\nx = 'é' + y\n")
    found = tree.find(SourceLine(file="net.py", line=2, text="", end_line=2, column=11, end_column=12))
    assert tree.code(found) == "y"


def test_nothing_of_a_file_is_lost_beside_its_change():
    for text in ("\ufeffx = 1\n\n\n   ", "x = 1\r", "x = 1\r\n\r\n\t", "def f():\n    return 1\n  # end\n", "x = 1"):
        tree = parse_source(text)
        assert (tree.mark + tree.text + tree.end, tree.module.code) == (text, tree.text)


@pytest.mark.parametrize(
    ("text", "other"), [("-x", "x"), ("-a * b / c", "a * b / c"), ("-a + b", "-(-a + b)"), ("-a @ b", "-(-a @ b)")]
)
def test_the_other_sign_of_an_expression(text, other):
    assert negated(text) == other


def find(tree, text):
    line = tree.text.splitlines()[1]
    column = line.index(text)
    place = {"line": 2, "end_line": 2, "column": column, "end_column": column + len(text)}
    return tree.find(SourceLine(file="net.py", text=line, **place))


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        ("(x @ w / t).clamp(max=80)", "    product = wide(x)\n    y = torch.exp((product / t).clamp(max=80))"),
        ("other", None),  # what is replaced inside of it is not in it any more
        ("(", None),
    ],
)
def test_a_change_inside_of_another_is_made_in_its_text(outer, expected):
    tree = parse_source("def f(x, w, t):\n    y = torch.exp(x @ w / t)\n")
    inside = Replacement(node=find(tree, "x @ w"), text="product", before=("product = wide(x)",))
    around = Replacement(node=find(tree, "x @ w / t"), text=outer)
    made = tree.replaced([around, inside])
    assert (made and made.partition("\n")[2]) == expected


def test_statements_of_the_outer_change_have_the_inner_one_too():
    tree = parse_source("def f(a, b, c, x):\n    y = a / (b(x) + c)\n")
    inner = Replacement(node=find(tree, "x"), text="x.float()")
    outer = Replacement(node=find(tree, "a / (b(x) + c)"), text="a / divisor", before=("divisor = b(x) + c",))
    made = tree.replaced([inner, outer])
    assert made == "def f(a, b, c, x):\n    divisor = b(x.float()) + c\n    y = a / divisor"


@pytest.mark.parametrize(
    ("code", "outer", "expected"),
    [
        ("x / torch.sqrt(x)", "x / where(torch.sqrt(x))", "x / where(torch.sqrt(low))"),
        ("self.x * torch.sqrt(x)", "(self.x * torch.sqrt(x)).clip(x=1)", "(self.x * torch.sqrt(low)).clip(x=1)"),
        ("torch.sqrt(x)", "torch.sqrt(x).x(x=1)", "torch.sqrt(low).x(x=1)"),
        ("torch.sqrt(x) - torch.sqrt(x)", "torch.sqrt(x)", None),
    ],
)
def test_a_change_inside_of_another_is_of_its_own_place(code, outer, expected):
    tree = parse_source(f"def f(self, x):\n    y = {code}\n")
    argument = next(item.args[0].value for item in nodes_in(find(tree, code)) if isinstance(item, cst.Call))
    made = tree.replaced([Replacement(node=find(tree, code), text=outer), Replacement(node=argument, text="low")])
    assert (made and made.splitlines()[1]) == (expected and f"    y = {expected}")
    assert tree.replaced([Replacement(node=argument, text=text) for text in ("x.float()", "x.abs()")]) is None
