"""The source around an expression, for a reader who wants to see the line in its place."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

from nandoctor.evidence.exhibits import Excerpt
from nandoctor.evidence.trace import SourceLine
from nandoctor.source_files import parse
from nandoctor.text import relative_path

CONTEXT = 3
_TAB = 4
_MAX_LINES = 40
_LONGEST_LINE = 400

_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_excerpt(source: SourceLine) -> Excerpt | None:
    """The expression's lines with a few around them; None where the file is gone or holds another line there."""
    lines = linecache.getlines(source.file)
    if not 0 < source.line <= len(lines) or lines[source.line - 1].strip() != source.text:
        return None
    end_line = min(source.end_line or source.line, len(lines), source.line + _MAX_LINES)
    scopes = _enclosing(lines, source.line)
    inner = next((scope for scope in reversed(scopes) if not isinstance(scope, ast.ClassDef)), None)
    first = max(inner.lineno if inner else 1, source.line - CONTEXT)
    last = min(inner.end_lineno or len(lines) if inner else len(lines), end_line + CONTEXT)
    known = source.column is not None and source.end_column is not None and end_line == source.end_line
    return Excerpt(
        file=source.file,
        path=relative_path(source.file),
        function=".".join(scope.name for scope in scopes),
        first=first,
        lines=tuple(line.rstrip().expandtabs(_TAB)[:_LONGEST_LINE] for line in lines[first - 1 : last]),
        line=source.line,
        end_line=end_line,
        column=_place(lines[source.line - 1], source.column) if known else None,
        end_column=_place(lines[end_line - 1], source.end_column) if known else None,
    )


def _place(line: str, offset: int | None) -> int:
    """The column of a byte of the line, in characters once its tabs are spaces."""
    before = line.encode()[: offset or 0].decode(errors="replace")
    return min(len(before.expandtabs(_TAB)), _LONGEST_LINE)


def _enclosing(lines: list[str], line: int) -> list[_Scope]:
    """The classes and functions around a line, outermost first; none where the file is no Python."""
    tree = parse("".join(lines))
    return [] if tree is None else list(_scopes(tree, line))


def _scopes(tree: ast.AST, line: int) -> Iterator[_Scope]:
    for node in ast.iter_child_nodes(tree):
        if getattr(node, "lineno", line) <= line <= (getattr(node, "end_lineno", None) or line):
            if isinstance(node, _Scope):
                yield node
            yield from _scopes(node, line)
