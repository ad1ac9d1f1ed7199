"""Resolves a name at a place in a function to its definition, if that is certain."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from functools import cached_property
from itertools import chain

from nandoctor.changes.editor import Editor
from nandoctor.changes.source_tree import COMPREHENSIONS, CannotWriteError, grouped, name_called

_LOOPS = (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)
_SEVERAL = (ast.Tuple, ast.List, ast.Starred)
_SAME_MEMORY = ("data", "T", "mT")


class Definitions:
    """The bindings of names in the function around a node, and their places; parameters are not included.

    Raises CannotWriteError for a node outside of functions.
    """

    def __init__(self, editor: Editor, node: ast.AST) -> None:
        function = editor.tree.scope_of(node)
        if isinstance(function, ast.Module):
            raise CannotWriteError
        self._editor, self._tree, self._function = editor, editor.tree, function
        self.passed: dict[ast.Assign, None] = {}
        """The assignments of the names that were resolved."""

    def has(self, node: ast.AST, editor: Editor) -> bool:
        """Return True if a node of an editor's file is in the function itself."""
        return editor is self._editor and self._tree.scope_of(node) is self._function

    @cached_property
    def _bound(self) -> dict[str, list[tuple[int, ast.AST]]]:
        """By name, the end of each node that binds it, and the node, in the order of the text."""
        found = defaultdict[str, list[tuple[int, ast.AST]]](list)
        body = self._function.body
        for node in chain.from_iterable(map(ast.walk, body if isinstance(body, list) else [body])):
            for name, made_by in self._names_bound(node):
                end = self._tree.span(made_by if hasattr(made_by, "lineno") else node)[1]  # a `with` item has none
                found[name].append((end, made_by))
        return {name: sorted(places, key=lambda place: place[0]) for name, places in found.items()}

    def _names_bound(self, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
        """Yield the names that a node binds, deletes or writes into, and by what: `x = 1`, `x[0] = 1`, `x.add_(1)`."""
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            around = (item for item in self._tree.ancestors(node) if not isinstance(item, _SEVERAL))
            yield _base_name(node), next(around, node)
        elif isinstance(node, ast.alias | ast.ExceptHandler | ast.arg):
            yield str(getattr(node, "arg", "") or getattr(node, "asname", "") or getattr(node, "name", "")), node
        elif isinstance(node, ast.Call):
            yield from ((_base_name(item), node) for item in _written_by(node))

    def assignment_of(self, name: ast.Name) -> ast.Assign | None:
        """Return the assignment that a name gets its value from where it is read, None if that depends on the path."""
        before = [(end, node) for end, node in self._bound.get(name.id, ()) if end <= self._tree.span(name)[0]]
        node = before[-1][1] if before else None
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not _name_of(node):
            return None
        block, above = self._tree.block_of(node), {*self._tree.ancestors(node)}
        around = [parent for parent in self._tree.ancestors(name) if parent not in above]
        loops = [self._tree.span(parent) for parent in around if isinstance(parent, _LOOPS)]
        is_in_block = any(parent in block for parent in around)
        return node if is_in_block and not any(self._binds_between(name.id, *loop) for loop in loops) else None

    def resolved(self, node: ast.expr) -> ast.expr:
        """Return what an expression stands for, if it is a name and that is certain."""
        while isinstance(node, ast.Name) and (made := self.assignment_of(node)) is not None:
            self.passed[made] = None
            node = made.value
        return node

    def is_bound_between(self, node: ast.AST, place: ast.AST) -> bool:
        """Return True if a name in an expression is bound anew, or written to, between it and another place."""
        start, end = sorted((self._tree.span(node)[1], self._tree.span(place)[0]))
        names = (item.id for item in ast.walk(node) if isinstance(item, ast.Name))
        return any(self._binds_between(name, start, end) for name in names)

    def text_at(self, node: ast.expr, place: ast.AST) -> str:
        """Return the text of an expression as it can stand at an earlier place; later names become what they stand for.

        Raises:
            CannotWriteError: a name may have another value there.
        """
        texts = dict[ast.AST, str]()
        for name in (item for item in ast.walk(node) if isinstance(item, ast.Name)):
            if self.is_bound_between(name, place):
                if (made := self.assignment_of(name)) is None:
                    raise CannotWriteError
                texts[name] = grouped(self.text_at(made.value, place))
        return self._editor.code(node, texts)

    def _binds_between(self, name: str, start: int, end: int) -> bool:
        return any(start < where <= end for where, _ in self._bound.get(name, ()))

    def remove_unread(self, replaced: Iterable[ast.AST], still_read: Set[str]) -> None:
        """Remove the assignments that were resolved and that nothing reads without the `replaced` expressions."""
        gone: set[ast.AST] = {below for node in replaced for below in ast.walk(node)}
        names = [node for node in ast.walk(self._function) if isinstance(node, ast.Name) and not self._is_target(node)]
        left = [node for node in self.passed if _name_of(node) not in still_read]
        while unread := [node for node in left if not self._is_read(node, names, gone)]:
            for statement in unread:
                self._editor.remove(statement)
                gone.update(ast.walk(statement))
            left = [node for node in left if node not in unread]

    def _is_read(self, assignment: ast.Assign, names: Iterable[ast.Name], gone: Set[ast.AST]) -> bool:
        """Return True if one of the names, but those `gone`, may refer to what an assignment binds."""
        same = (name for name in names if name.id == _name_of(assignment) and name not in gone)
        return any(self.assignment_of(name) in (None, assignment) for name in same)

    def _is_target(self, node: ast.AST) -> bool:
        parent = self._tree.parent(node)
        return isinstance(parent, ast.Assign) and node is not parent.value


def _name_of(node: ast.Assign) -> str:
    target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _written_by(call: ast.Call) -> Iterator[ast.AST]:
    """Yield what a call changes in place, as far as its text shows."""
    name = name_called(call)
    keywords = {item.arg: item.value for item in call.keywords}
    inplace = keywords.get("inplace")
    is_named_so = name.endswith("_") and not name.endswith("__")
    if is_named_so or (isinstance(inplace, ast.Constant) and inplace.value is True):
        yield from (call.func.value,) if isinstance(call.func, ast.Attribute) else ()
        yield from call.args[:1]
    if "out" in keywords:
        yield keywords["out"]


def _base_name(target: ast.AST) -> str:
    """Return the `x` of `x`, `x[0]`, `x.data`, `x.view(-1)` and `*x`, or a dotted name; "" for anything else."""
    match target:
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Subscript(value=inner) | ast.Starred(value=inner):
            return _base_name(inner)
        case ast.Attribute(value=inner, attr=name) if name in _SAME_MEMORY:
            return _base_name(inner)
        case ast.Name() | ast.Attribute():
            return ast.unparse(target)
    return ""
