"""A source file as Python's own syntax tree, in which a trace's positions are those of the nodes; texts of parts."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Set
from functools import cached_property, lru_cache
from itertools import accumulate

from nandoctor.evidence.trace import SourceLine

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


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NOT_IN_EACH_RUN = (ast.Lambda, *COMPREHENSIONS, ast.IfExp, ast.BoolOp)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_BYTE_ORDER_MARK = "\ufeff"


class CannotWriteError(Exception):
    """No source text is known that does what the edit does."""


class SourceTree:
    """A parsed file; `mark` is the byte order mark before its text, or "".

    Offsets count bytes of UTF-8, as CPython's columns do. `known` are names of modules and classes that the file can
    use without importing them, such as from another notebook cell.

    Raises SyntaxError, ValueError or RecursionError if Python cannot parse it.
    """

    def __init__(self, text: str, known: Set[str] = frozenset()) -> None:
        self._known = known
        self.mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
        self.text = text.removeprefix(_BYTE_ORDER_MARK)
        self.data = self.text.encode()
        self.module = ast.parse(self.text)
        lines = self.data.splitlines(keepends=True)  # of bytes: a form feed ends no line, for Python neither
        self._starts = [0, *accumulate(map(len, lines))]
        self._parents = dict(_parents_below(self.module))
        self._found: dict[SourceLine, ast.expr | ast.AugAssign | None] = {}

    @cached_property
    def newline(self) -> str:
        """The line ending of the file's first line."""
        found = re.search(r"\r\n|\r|\n", self.text)
        return found[0] if found else "\n"

    @cached_property
    def unit(self) -> str:
        """The indentation of the file's first block."""
        bodies = (getattr(item, "body", []) for item in self.module.body)
        return next((blanks for body in bodies if body and (blanks := self.indent_of(body[0]))), " " * 4)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets of a node's first byte and of the byte behind its last."""
        start = self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def outer_span(self, node: ast.AST) -> tuple[int, int]:
        """Return the span of a node with the parentheses directly around it, but those of a call."""
        start, end = self.span(node)
        parent = self._parents.get(node)
        end_of_call = self.span(parent)[1] if isinstance(parent, ast.Call) and node is not parent.func else None
        while True:
            before, after = self.data[:start].rstrip(), self.data[end:].lstrip()
            opens, closes = len(before) - 1, len(self.data) - len(after) + 1
            if closes == end_of_call or not (before.endswith(b"(") and after.startswith(b")")):
                return start, end
            start, end = opens, closes

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def code(self, node: ast.AST) -> str:
        """Return the source of a node without the parentheses around it, and without its block's indentation."""
        start, end = self.span(node)
        return reindent(self.data[start:end].decode().replace("\r\n", "\n"), self.indent_of(node), "")

    def indent_of(self, node: ast.AST) -> str:
        """Return the blanks before the first statement on the line of a node's statement."""
        statement = next((item for item in (node, *self.ancestors(node)) if isinstance(item, ast.stmt)), node)
        line = self.data[self._offset(getattr(statement, "lineno", 1), 0) :].decode(errors="ignore")
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def lines_of(self, statement: ast.stmt) -> tuple[int, int]:
        """Return the span of a statement's lines."""
        return self._starts[statement.lineno - 1], self._starts[statement.end_lineno or statement.lineno]

    def find(self, source: SourceLine) -> ast.expr | ast.AugAssign | None:
        """Return the smallest expression at the place that the trace gives, None if the place is only a line.

        A call of a method begins, for the trace, at the method's name if that stands on another line.
        """
        if source in self._found:
            return self._found[source]
        if source.column is None or source.end_column is None or source.end_line is None:
            return None
        if source.end_line >= len(self._starts):
            return None
        start, end = self._offset(source.line, source.column), self._offset(source.end_line, source.end_column)
        holding = [(last - first, node) for first, last, node in self._expressions if first <= start and end <= last]
        self._found[source] = min(holding, key=lambda found: found[0], default=(0, None))[1]
        return self._found[source]

    @cached_property
    def _expressions(self) -> list[tuple[int, int, ast.expr | ast.AugAssign]]:
        nodes = (node for node in self._parents if isinstance(node, ast.expr | ast.AugAssign))
        return [(*self.span(node), node) for node in nodes]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain this one, nearest first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node directly around another."""
        return self._parents.get(node)

    def statement_of(self, node: ast.AST) -> ast.stmt | None:
        """Return the simple statement, alone on its line, that evaluates the expression in each of its runs.

        None inside a lambda, a comprehension, a conditional expression or the head of a compound statement: what is put
        before the statement would not run as often, or not with the same names.
        """
        for parent in (node, *self.ancestors(node)):
            if parent is not node and isinstance(parent, NOT_IN_EACH_RUN):
                return None
            if isinstance(parent, ast.stmt):
                return parent if self.stands_alone(parent) else None
        return None

    def stands_alone(self, statement: ast.stmt, last_on_line: ast.stmt | None = None) -> bool:
        """Return True if a simple statement in a block, with those after it on its line, has the lines for itself."""
        if hasattr(statement, "body") or isinstance(self._parents[statement], ast.Module):
            return False
        (first, last), (start, _) = self.lines_of(statement), self.span(statement)
        _, end = self.span(last_on_line or statement)
        behind = self.data[end:last].strip()
        return not self.data[first:start].strip() and (not behind or behind.startswith(b"#"))

    def statement_at(self, line: int) -> ast.stmt | None:
        """Return the first simple statement that a line belongs to, None if no block can be put around the line."""
        simple = (node for node in self._parents if isinstance(node, ast.stmt) and not hasattr(node, "body"))
        found = [node for node in simple if node.lineno <= line <= (node.end_lineno or 0)]
        return found[0] if found and self.stands_alone(found[0], found[-1]) else None

    def function_of(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the function that contains the node, or None."""
        return next((item for item in self.ancestors(node) if isinstance(item, FUNCTIONS)), None)

    def scope_of(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module:
        """Return the function or lambda whose names the node reads, or the module."""
        scopes = (item for item in self.ancestors(node) if isinstance(item, (*FUNCTIONS, ast.Lambda)))
        return next(scopes, self.module)

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block that a statement is in."""
        parent = self._parents[statement]
        return next(block for name in _BLOCKS if statement in (block := getattr(parent, name, [])))

    @cached_property
    def imported_names(self) -> dict[str, bool]:
        """The names that the file's own imports bind, and the `known` ones; True if every function can use them."""
        found = dict.fromkeys(self._known, True)
        for node in self._parents:
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                name = (alias.asname or alias.name).partition(".")[0]
                found[name] = found.get(name, False) or self.function_of(node) is None
        return found


@lru_cache(maxsize=4)
def parse_source(text: str, known: frozenset[str] = frozenset()) -> SourceTree:
    """Parse a file, once for all changes that a search writes to it."""
    return SourceTree(text, known)


def _parents_below(root: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each node with the one around it, in the order of the text; not those in an f-string, which has others.

    Before Python 3.12 the positions in an f-string are not those in the file.
    """
    for child in ast.iter_child_nodes(root) if not isinstance(root, ast.JoinedStr) else ():
        if not isinstance(child, ast.expr_context | ast.operator | ast.unaryop | ast.cmpop | ast.boolop):
            yield child, root
            yield from _parents_below(child)


def names_in(root: ast.AST) -> set[str]:
    """Return every name that occurs in a node: of variables, attributes, keywords, parameters, functions."""
    found: set[str] = set()
    for node in ast.walk(root):
        for value in () if isinstance(node, ast.Constant) else vars(node).values():
            found.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str))
    return found


def name_called(node: ast.AST | None) -> str:
    """Return the name of the function or method that a call calls, without its owner; "" for anything else."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name
    return ""
