"""What a source file binds, where its expressions stand, and what changes of it, and of constructors, look like."""

import ast
from pathlib import Path

import pytest

from nandoctor.changes.editor import Editor, Library
from nandoctor.changes.source_tree import CannotWriteError, negated, parse_source
from nandoctor.evidence.trace import SourceLine

NO_LIBRARY = Library(has_module=lambda _: False, has_method=lambda _: True, default_eps=lambda _: None)


def editor(text):
    return Editor(parse_source(text), Path("net.py"), NO_LIBRARY)


def find(change, text):
    """The last expression of this text in the file."""
    before, _, _ = change.tree.text.rpartition(text)
    lines = before.encode().split(b"\n")
    place = {"line": len(lines), "end_line": len(lines) + text.count("\n"), "column": len(lines[-1])}
    end = len(text.encode().split(b"\n")[-1]) + (0 if "\n" in text else len(lines[-1]))
    return change.tree.find(SourceLine(file="net.py", text="", end_column=end, **place))


def test_lines_are_counted_as_python_counts_them():
    tree = parse_source("\ufeff# \f one line\nx = 'é' + y\n")
    found = tree.find(SourceLine(file="net.py", line=2, text="", end_line=2, column=11, end_column=12))
    assert tree.code(found) == "y"


@pytest.mark.parametrize(
    "text", ["\ufeffx = 1\n\n\n   ", "x = 1\r", "x = 1\r\n\r\n\t", "def f():\n    return 1\n  # end\n", "x = 1"]
)
def test_nothing_of_a_file_is_lost_beside_its_change(text):
    change = editor(text)
    change.replace(find(change, "1"), "2")
    assert change.tree.mark + change.text() == text.replace("1", "2")


@pytest.mark.parametrize(
    ("text", "other"), [("-x", "x"), ("-a * b / c", "a * b / c"), ("-a + b", "-(-a + b)"), ("-a @ b", "-(-a @ b)")]
)
def test_the_other_sign_of_an_expression(text, other):
    assert negated(text) == other


EDITS = {
    "in its own parentheses": ("y = (x + 1).exp()", "x + 1", "(product / t)", "y = (product / t).exp()"),
    "without parentheses for an atom": ("y = (x + 1).exp()", "x + 1", "h", "y = h.exp()"),
    "of a call, whose parentheses stay": ("y = f(x)", "x", "a + b", "y = f(a + b)"),
    "in parentheses of a keyword": ("y = f(dim=(1))", "1", "2", "y = f(dim=2)"),
    "with parentheses in another operator": ("y = x * 2", "x", "a + b", "y = (a + b) * 2"),
    "as tight as its own operator": ("y = a + b - c", "a + b", "d + e", "y = d + e - c"),
    "behind a keyword": ("return(x)", "x", "y", "return y"),
    "beside a letter of two bytes": ("y = é + x", "x", "z", "y = é + z"),
    "in an item": ("y = x[i, 0]", "i", "a if b else c", "y = x[(a if b else c), 0]"),
    "over two lines": (
        "y = f(\n    x,\n    1,\n)",
        "x",
        "x.clamp(\n    min=0\n)",
        "y = f(\n    x.clamp(\n    min=0\n),\n    1,\n)",
    ),
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", EDITS)
def test_an_expression_gets_another_text(name, end):
    code, old, new, expected = EDITS[name]
    lines = [f"    {line}" for line in code.split("\n")]
    change = editor(end.join(["def f(x, t):", "    # é", *lines, ""]))
    change.replace(find(change, old.replace("\n", end)), new)
    assert change.text() == end.join(["def f(x, t):", "    # é", *(f"    {line}" for line in expected.split("\n")), ""])


BLOCK = 'def f(x):\n\t"""Say."""\n\n\t# first\n\ty = g(\n\t\tx,\n\t\t"""a\n\tb""",\n\t)  # done\n\treturn y\n'


def test_a_statement_is_put_into_a_block_with_others_before_it():
    change = editor(BLOCK)
    call = find(change, 'g(\n\t\tx,\n\t\t"""a\n\tb""",\n\t)')
    change.wrap(change.tree.statement_of(call), "with h:")
    change.replace(call.args[0], "w", ("w = x",))
    expected = '\t# first\n\tw = x\n\twith h:\n\t\ty = g(\n\t\t\tw,\n\t\t\t"""a\n\tb""",\n\t\t)  # done\n\treturn y\n'
    assert change.text().partition("\n\n")[2] == expected
    change.wrap(change.tree.module.body[0].body[-1], "with h:")
    assert change.text().endswith("\t\t)  # done\n\t\treturn y\n")


@pytest.mark.parametrize(
    ("code", "outer", "expected"),
    [
        ("sqrt(x) / y", "({}).clamp(max=80)", "(sqrt(low) / y).clamp(max=80)"),
        ("x / sqrt(x)", "x / where({})", "x / where(x / sqrt(low))"),
        ("sqrt(x) - sqrt(x)", "{}.abs()", "sqrt(low) - sqrt(x).abs()"),
        ("sqrt(x)", "other", None),  # what is replaced inside of it is not in it any more
    ],
)
def test_a_change_inside_of_another_is_made_in_its_text(code, outer, expected):
    change = editor(f"def f(self, x):\n    y = {code}\n")
    argument = next(item.args[0] for item in ast.walk(find(change, code)) if isinstance(item, ast.Call))
    change.replace(argument, "low", ("low = x.float()",))
    if expected is None:
        with pytest.raises(CannotWriteError):
            change.replace(find(change, code), outer)
        return
    change.replace(find(change, code), outer.format(change.code(find(change, code))))
    with pytest.raises(CannotWriteError):  # it is inside of what was replaced now
        change.replace(argument, "high")
    assert change.text() == f"def f(self, x):\n    low = x.float()\n    y = {expected}\n"
