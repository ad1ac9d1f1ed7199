"""Changes of one source file: what is replaced, put before a statement, put into a block, and removed."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType

from nandoctor.changes.source_tree import (
    ATOMS,
    CannotWriteError,
    SourceTree,
    as_part,
    grouped,
    names_in,
    on_one_line,
    parse_expression,
    reindent,
)
from nandoctor.evidence.trace import OpCall

HAS_EFFECTS = (ast.Call, ast.NamedExpr, ast.Await)
"""Expressions that may have side effects, so they must not be evaluated twice."""
Texts = Mapping[ast.AST, str]
"""New texts by the nodes that they stand for."""
NO_TEXTS: Texts = MappingProxyType({})
_HOLDS_ANY = (ast.Assign, ast.AnnAssign, ast.Call, ast.keyword, ast.Expr, ast.Return)
"""Nodes in which an expression of any kind needs no parentheses."""


_Region = tuple[int, int, str]
"""A part of the file, from one offset to another, and its new text."""


@dataclass(slots=True, kw_only=True)
class _Lines:
    """What happens to the lines of a statement: `before` come first, and `header` is that of a block around it."""

    before: list[str] = field(default_factory=list)
    header: str = ""
    is_removed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What the writer asks about torch, which this room does not import.

    `has_module` tells the names of torch.nn's classes, `has_method` those of a tensor's methods, and `default_eps` the
    default eps of the function of that name. `device` is the type of device whose autocast the training uses.
    """

    has_module: Callable[[str], bool]
    has_method: Callable[[str], bool]
    default_eps: Callable[[str], float | None]
    device: str = "cuda"

    @property
    def off_autocast(self) -> str:
        """The line that turns autocast off for the ops inside."""
        return f'with torch.autocast("{self.device}", enabled=False):'


class Editor:
    """The changes of one file. Inner expressions are replaced first: an outer one's new text then has theirs in it."""

    def __init__(self, tree: SourceTree, file: Path, library: Library) -> None:
        self.tree, self.file, self.library = tree, file, library
        self._new_names: set[str] = set()
        self._replaced: dict[ast.AST, str] = {}
        self._lines = defaultdict[ast.stmt, _Lines](_Lines)

    def calls(self, ops: Iterable[OpCall]) -> Iterator[tuple[ast.expr | ast.AugAssign, OpCall]]:
        """Yield the file's expressions that called ops, each with its op."""
        for op in ops:
            source = op.source
            node = self.tree.find(source) if source is not None and Path(source.file) == self.file else None
            if node is not None:
                yield node, op

    def code(self, node: ast.AST, texts: Texts = NO_TEXTS) -> str:
        """Return the source of a node as changed so far, without the parentheses around it.

        `texts` replace nodes inside it, including the parentheses around these.
        """
        if node in self._replaced and not texts:
            return self._replaced[node]
        given = [self._region(part, text) for part, text in texts.items()]
        made = self._written(*self.tree.span(node), [*given, *self._expressions(without=node)])
        return reindent(made.replace("\r\n", "\n"), self.tree.indent_of(node), "")

    def operand(self, node: ast.AST) -> str:
        """Return the source of an expression as an operand, or before an attribute."""
        return grouped(self.code(node))

    def is_replaced(self, node: ast.AST) -> bool:
        """Return True if a node has a new text of its own."""
        return node in self._replaced

    def replace(self, node: ast.AST, text: str, before: Iterable[str] = ()) -> None:
        """Replace an expression by a text, and put statements before its own statement.

        Raises CannotWriteError if the text leaves out what was replaced inside the expression, if the expression is
        inside of one that was replaced, or if no statement can be put there.
        """
        texts, statement = (text, *before), self.tree.statement_of(node)
        if any(above in self._replaced for above in self.tree.ancestors(node)):
            raise CannotWriteError
        inside = [other for other in self._replaced if other is node or node in self.tree.ancestors(other)]
        inner = [self._replaced.pop(other) for other in inside]
        if any(all(was not in whole for whole in texts) for was in inner):
            raise CannotWriteError
        self._replaced[node] = text
        if texts[1:]:
            if statement is None:
                raise CannotWriteError
            self._lines[statement].before += texts[1:]

    def put_first(self, function: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> None:
        """Put a statement where a function begins; raises CannotWriteError if its first one shares a line."""
        first = next((it for it in function.body if not _must_come_first(it)), function.body[0])
        if not self.tree.stands_alone(first):
            raise CannotWriteError
        self._lines[first].before.append(text)

    def wrap(self, statement: ast.stmt, header: str) -> None:
        """Put a statement into the block of a `with` statement, that of the statement before it if it is the same."""
        self._lines[statement].header = header

    def remove(self, statement: ast.stmt) -> None:
        """Remove a statement if it has its lines for itself."""
        if self.tree.stands_alone(statement):
            self._lines[statement].is_removed = True

    def new_name(self, wanted: str, node: ast.AST) -> str:
        """Return a name that neither the function around a node nor another change of the file uses."""
        taken = names_in(self.tree.function_of(node) or self.tree.module) | self._new_names
        name = next(name for name in chain([wanted], (f"{wanted}_{n}" for n in count(2))) if name not in taken)
        self._new_names.add(name)
        return name

    def named(self, node: ast.AST, text: str, wanted: str) -> tuple[str, str, tuple[str, ...]]:
        """Return the text of a value for its first use and for later uses, and the statements to put before.

        It is computed once: by a statement before its own or, if none can be put there, by `:=` at its first use. There
        an expression without a call is repeated: in a comprehension, `:=` would give the function another variable.
        """
        value, has_statement = parse_expression(text), self.tree.statement_of(node) is not None
        if isinstance(value, ast.Name | ast.Attribute):
            return text, text, ()
        if not has_statement and not any(isinstance(below, HAS_EFFECTS) for below in ast.walk(value)):
            return as_part(text), as_part(text), ()
        name = self.new_name(wanted, node)
        if not has_statement:
            return f"({name} := {text})", name, ()
        return name, name, (f"{name} = {on_one_line(text)}",)

    def text(self) -> str:
        """Return the whole changed text, with `import torch` if only the change needs torch."""
        expressions = self._expressions()
        statements = [self._statement(*item, expressions) for item in self._lines.items()]
        texts = [*self._replaced.values()]
        texts += [text for lines in self._lines.values() for text in (lines.header, *lines.before)]
        needs_torch = not self.tree.imported_names.get("torch") and any("torch." in text for text in texts)
        imports = [self._import()] if needs_torch else []
        return self._written(0, len(self.tree.data), [*statements, *expressions, *imports])

    def _import(self) -> _Region:
        """Return the line that imports torch, at the first possible place."""
        body = self.tree.module.body
        place = next((i for i, item in enumerate(body) if not _must_come_first(item)), len(body))
        lines = self.tree.lines_of(body[max(place - 1, 0)])
        offset = lines[1] if place else lines[0]
        return offset, offset, f"import torch{self.tree.newline}"

    def _expressions(self, without: ast.AST | None = None) -> list[_Region]:
        replaced = ((node, text) for node, text in self._replaced.items() if node is not without)
        return [self._region(node, self._placed(node, text)) for node, text in replaced]

    def _region(self, node: ast.AST, text: str) -> _Region:
        start, end = self.tree.span(node) if isinstance(node, ast.stmt) else self.tree.outer_span(node)
        return start, end, self._absolute(text, self.tree.indent_of(node))

    def _absolute(self, text: str, indent: str) -> str:
        """Return a text with its block's indentation from the second line on, and the line endings of the file."""
        return reindent(text, "", indent).replace("\n", self.tree.newline)

    def _placed(self, node: ast.AST, text: str) -> str:
        """Return the text that replaces an expression, in parentheses if it needs them there."""
        if isinstance(node, ast.AugAssign):
            return text
        outer = self.tree.outer_span(node)
        is_bare = self.tree.span(node) == outer
        holds_any = isinstance(self.tree.parent(node), _HOLDS_ANY) or _binds_as_tightly(parse_expression(text), node)
        made = text if is_bare and holds_any else as_part(text)
        is_glued = self.tree.data[outer[0] - 1 : outer[0]].isalnum() and made[:1].isidentifier()  # return(x)
        return f" {made}" if is_glued else made

    def _statement(self, node: ast.stmt, lines: _Lines, expressions: Iterable[_Region]) -> _Region:
        """Return the lines of a statement as they become."""
        start, end = self.tree.lines_of(node)
        indent, block = self.tree.indent_of(node), self.tree.block_of(node)
        place = block.index(node)
        above = self._lines.get(block[place - 1]) if place else None
        is_joined = above is not None and bool(lines.header) and above.header == lines.header
        texts, inside = [*lines.before], indent + self.tree.unit if is_joined else indent
        inner = "" if lines.is_removed else self._written(start, end, expressions)
        if lines.header:
            texts += [] if is_joined else [lines.header]
            inner = reindent(f"\n{inner}", "", self.tree.unit)[1:]
        made = [f"{inside}{self._absolute(text, inside)}{self.tree.newline}" for text in texts]
        return start, end, "".join([*made, inner])

    def _written(self, start: int, end: int, regions: Iterable[_Region]) -> str:
        """Return the text between two offsets with its outermost regions written anew."""
        made, at = list[str](), start
        for first, last, text in sorted(regions, key=lambda region: (region[0], -region[1])):
            if at <= first and last <= end:
                made += [self.tree.data[at:first].decode(), text]
                at = last
        return "".join([*made, self.tree.data[at:end].decode()])


def _binds_as_tightly(node: ast.expr, other: ast.AST) -> bool:
    """Return True if an expression can replace the other one without parentheses."""
    if isinstance(node, ast.BinOp) and isinstance(other, ast.BinOp):
        return type(node.op) is type(other.op)
    return isinstance(node, ATOMS)


def _must_come_first(statement: ast.stmt) -> bool:
    """Return True for a docstring or an import from __future__."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())) | ast.ImportFrom(module="__future__"):
            return True
    return False
