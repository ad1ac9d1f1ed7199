"""Texts of expressions and statements: their parentheses, and the indentation of their lines."""

from __future__ import annotations

import ast
import io
import tokenize

ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.JoinedStr)


def parse_expression(text: str) -> ast.expr:
    """Parse an expression, which may be over several lines."""
    return ast.parse(f"({text}\n)", mode="eval").body


def is_closed(text: str) -> bool:
    """Return True if a text is an expression in parentheses."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:  # over several lines without parentheses
        return False
    return (node.lineno, node.col_offset) > (1, 0) and not isinstance(node, ast.Tuple | ast.GeneratorExp)


def on_one_line(text: str) -> str:
    """Return the text of an expression that can stand behind an `=`: in parentheses if it needs them to go on."""
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return f"({text})"
    return text


def grouped(text: str) -> str:
    """Return the text of an expression, in parentheses unless an attribute can follow it directly."""
    node = parse_expression(text)
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, float)
    plain = is_number or isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return text if plain or is_closed(text) else f"({text})"


def as_part(text: str) -> str:
    """Return the text of an expression that can be put anywhere: in parentheses, unless it is an atom on one line."""
    is_atom = isinstance(parse_expression(text), ATOMS) and "\n" not in text
    return text if is_atom or is_closed(text) else f"({text})"


def negated(text: str) -> str:
    """Return the text of the negated expression."""
    first = parse_expression(text)
    while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Mult | ast.Div):
        first = first.left
    if text.startswith("-") and isinstance(first, ast.UnaryOp):
        return text[1:].lstrip()
    return f"-{grouped(text)}"


def reindent(text: str, old: str, new: str) -> str:
    """Return a text with another indentation of all its lines but the first; strings over several lines stay."""
    if "\n" not in text:
        return text
    first, *others = text.split("\n")
    inside = _lines_in_strings(text)
    for number, line in enumerate(others):
        if line.strip() and number + 2 not in inside and line.startswith(old):
            others[number] = new + line.removeprefix(old)
    return "\n".join([first, *others])


def _lines_in_strings(text: str) -> set[int]:
    """Return the numbers of the lines that begin inside a string."""
    if '"""' not in text and "'''" not in text and "\\\n" not in text:
        return set()
    found: set[int] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING or token.type == getattr(tokenize, "FSTRING_MIDDLE", None):
                found.update(range(token.start[0] + 1, token.end[0] + 1))
    except (tokenize.TokenError, IndentationError):
        pass  # the text of an expression may end inside a bracket of its statement
    return found
