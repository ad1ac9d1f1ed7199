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
    is_closed,
    names_in,
    on_one_line,
    parse_expression,
    reindent,
)
from nandoctor.evidence.trace import SourceLine

HAS_EFFECTS = (ast.Call, ast.NamedExpr, ast.Await)
"""Expressions that may have side effects, so they must not be evaluated twice."""
Texts = Mapping[ast.AST, str]
"""New texts by the nodes that they stand for."""
_NO_TEXTS: Texts = MappingProxyType({})
_HOLDS_ANY = (ast.Assign, ast.AnnAssign, ast.Call, ast.keyword, ast.Expr, ast.Return)
"""Nodes in which an expression of any kind needs no parentheses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """A part of the file that `make` writes anew, given its text with all changes inside it."""

    start: int
    end: int
    make: Callable[[str], str]


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

    def find(self, source: SourceLine) -> ast.expr | ast.AugAssign | None:
        """Return the expression at an op's place; None if the place is only a line, or in another file."""
        return self.tree.find(source) if Path(source.file) == self.file else None

    def code(self, node: ast.AST, texts: Texts = _NO_TEXTS) -> str:
        """Return the source of a node as changed so far, without the parentheses around it.

        `texts` replace nodes inside it, including the parentheses around these.
        """
        if node in self._replaced and not texts:
            return self._replaced[node]
        given = [self._region(part, text) for part, text in texts.items()]
        others = [region for region in self._expressions(without=node) if not any(_is_in(region, it) for it in given)]
        made = self._written(*self.tree.span(node), [*given, *others])
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
        regions = [*self._expressions(), *(self._statement(*item) for item in self._lines.items())]
        if self._needs_torch():
            regions.append(self._import())
        return self._written(0, len(self.tree.data), regions)

    def _needs_torch(self) -> bool:
        texts = [*self._replaced.values()]
        texts += [text for lines in self._lines.values() for text in (lines.header, *lines.before)]
        return not self.tree.imported_names.get("torch") and any("torch." in text for text in texts)

    def _import(self) -> _Region:
        """Return the line that imports torch, at the first possible place."""
        body = self.tree.module.body
        place = next((i for i, item in enumerate(body) if not _must_come_first(item)), len(body))
        lines = self.tree.lines_of(body[max(place - 1, 0)])
        offset = lines[1] if place else lines[0]
        return _Region(start=offset, end=offset, make=lambda _: f"import torch{self.tree.newline}")

    def _expressions(self, without: ast.AST | None = None) -> Iterator[_Region]:
        """Yield the regions of the replaced expressions."""
        for node, text in self._replaced.items():
            if node is not without:
                yield self._region(node, self._placed(node, text))

    def _region(self, node: ast.AST, text: str) -> _Region:
        start, end = self.tree.span(node) if isinstance(node, ast.stmt) else self.tree.outer_span(node)
        made = self._absolute(text, self.tree.indent_of(node))
        return _Region(start=start, end=end, make=lambda _: made)

    def _absolute(self, text: str, indent: str) -> str:
        """Return a text with its block's indentation from the second line on, and the line endings of the file."""
        return reindent(text, "", indent).replace("\n", self.tree.newline)

    def _placed(self, node: ast.AST, text: str) -> str:
        """Return the text that replaces an expression, in parentheses if it needs them there."""
        if isinstance(node, ast.AugAssign):
            return text
        outer = self.tree.outer_span(node)
        if self.tree.span(node) != outer:
            made = as_part(text)
        elif isinstance(self.tree.parent(node), _HOLDS_ANY) or _binds_as_tightly(parse_expression(text), node):
            made = text
        else:
            made = text if is_closed(text) else f"({text})"
        is_glued = self.tree.data[outer[0] - 1 : outer[0]].isalnum() and made[:1].isidentifier()  # return(x)
        return f" {made}" if is_glued else made

    def _statement(self, node: ast.stmt, lines: _Lines) -> _Region:
        """Return the lines of a statement as they become."""
        start, end = self.tree.lines_of(node)
        indent, previous = self.tree.indent_of(node), self.tree.previous(node)
        above = self._lines.get(previous) if previous is not None else None
        is_joined = above is not None and bool(lines.header) and above.header == lines.header

        def make(inner: str) -> str:
            texts, inside = [*lines.before], indent + self.tree.unit if is_joined else indent
            if lines.header:
                texts += [] if is_joined else [lines.header]
                inner = reindent(f"\n{inner}", "", self.tree.unit)[1:]
            made = [f"{inside}{self._absolute(text, inside)}{self.tree.newline}" for text in texts]
            return "".join([*made, "" if lines.is_removed else inner])

        return _Region(start=start, end=end, make=make)

    def _written(self, start: int, end: int, regions: Iterable[_Region]) -> str:
        """Return the text between two offsets with the regions inside written anew."""
        inside = (region for region in regions if start <= region.start and region.end <= end)
        left = sorted(inside, key=lambda region: (region.start, -region.end))
        made, at = list[str](), start
        while left:
            region, *left = left
            within = [other for other in left if _is_in(other, region)]
            left = [other for other in left if not _is_in(other, region)]
            made.append(self.tree.data[at : region.start].decode())
            made.append(region.make(self._written(region.start, region.end, within)))
            at = region.end
        return "".join([*made, self.tree.data[at:end].decode()])


def _is_in(region: _Region, other: _Region) -> bool:
    return other.start <= region.start and region.end <= other.end and region.start < other.end


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
