"""Finds small constants that Python rounded away before torch saw them: `1.0 - 1e-17` is 1."""

from __future__ import annotations

import ast
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from nandoctor.evidence.formats import LARGEST_EPS
from nandoctor.evidence.trace import OpCall
from nandoctor.source_files import parse

_DEPTH = 5
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[int, int, int, int]


def list_folded(op: OpCall, attributes: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the op's arguments in which a constant was lost next to a number, each with the constant.

    `attributes` are the module's known ones. An argument counts only if its number, computed from the source with names
    and defaults of the file, is the one that the op was called with.
    """
    source = op.source
    if source is None or source.column is None or source.end_line is None or source.end_column is None:
        return
    place = (source.line, source.column, source.end_line, source.end_column)
    found = _index("".join(linecache.getlines(source.file))).get(place) if op.scalars else None
    if found is None:
        return
    node, scope = found
    reader = _Reader(scope=scope, attributes=attributes)
    for operand in _operands(node):
        value = reader.value(operand, _DEPTH)
        for name, number in op.scalars if value is not None else ():
            if number == value:
                yield from ((name, eps) for eps in reader.lost(operand, _DEPTH))
                break


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """The scope of an expression: its file, and the class and function around it, if any."""

    file: ast.Module
    owner: ast.ClassDef | None
    function: Function | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """An evaluator of expressions in `scope`, with Python's arithmetic; None for anything but a known number."""

    scope: _Scope
    attributes: Mapping[str, float]

    def value(self, node: ast.expr, depth: int) -> float | None:
        if isinstance(node, ast.Constant):
            return float(node.value) if isinstance(node.value, (int, float)) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand, depth)
            return None if value is None else -value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self.value(node.left, depth), self.value(node.right, depth)
            return None if left is None or right is None else _OPERATORS[type(node.op)](left, right)
        if depth and isinstance(node, ast.Attribute) and self._is_own(node) and node.attr in self.attributes:
            return self.attributes[node.attr]
        definition = self._definition(node) if depth else None
        return None if definition is None else self.value(definition, depth - 1)

    def lost(self, node: ast.expr, depth: int) -> Iterator[float]:
        """Yield the constants that do not change the number next to them."""
        if isinstance(node, ast.UnaryOp):
            yield from self.lost(node.operand, depth)
        elif isinstance(node, ast.BinOp):
            left, right, both = (self.value(part, depth) for part in (node.left, node.right, node))
            for eps, other in ((left, right), (right, left)):
                if (
                    eps is not None
                    and other is not None
                    and 0 < abs(eps) <= LARGEST_EPS
                    and abs(both or 0) == abs(other)
                ):
                    yield abs(eps)
            yield from self.lost(node.left, depth)
            yield from self.lost(node.right, depth)
        elif depth and (definition := self._definition(node)) is not None:
            yield from self.lost(definition, depth - 1)

    def _definition(self, node: ast.expr) -> ast.expr | None:
        """Return the expression that a name, or an attribute of the class, is set to, if that happens only once."""
        scope = self.scope
        if isinstance(node, ast.Name):
            inside = None if scope.function is None else _assigned(scope.function, node.id)
            return inside or _default(scope.function, node.id) or _assigned(scope.file, node.id)
        if isinstance(node, ast.Attribute) and self._is_own(node) and scope.owner is not None:
            return _assigned(scope.owner, node.attr)
        return None

    def _is_own(self, node: ast.Attribute) -> bool:
        """Return True for an attribute of the method's first argument, "self"."""
        arguments = self.scope.function.args.args if self.scope.function is not None else []
        return bool(arguments) and isinstance(node.value, ast.Name) and node.value.id == arguments[0].arg


def _assigned(scope: ast.Module | ast.ClassDef | Function, name: str) -> ast.expr | None:
    """Return the value of the only assignment to a name directly in this scope; None in a branch or a loop."""
    values = [
        statement.value
        for statement in scope.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name) and target.id == name
    ]
    is_constant = len(values) == 1 and not (isinstance(scope, Function) and _is_written_again(scope, name))
    return values[0] if is_constant else None


def _is_written_again(function: Function, name: str) -> bool:
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name)
    return sum(isinstance(node.ctx, ast.Store) for node in names) > 1


def _default(function: Function | None, name: str) -> ast.expr | None:
    if function is None:
        return None
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    given = dict(zip(reversed([argument.arg for argument in positional]), reversed(arguments.defaults), strict=False))
    given.update({a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None})
    return given.get(name)


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.Call):
        yield from (*node.args, *(keyword.value for keyword in node.keywords))


@lru_cache(maxsize=16)
def _index(text: str) -> dict[Place, tuple[ast.expr, _Scope]]:
    """Index every binary operation and call of a file by its place; of two at the same place, the outer one."""
    index: dict[Place, tuple[ast.expr, _Scope]] = {}
    if (tree := parse(text)) is not None:
        _collect(tree, _Scope(file=tree, owner=None, function=None), index)
    return index


def _collect(node: ast.AST, scope: _Scope, index: dict[Place, tuple[ast.expr, _Scope]]) -> None:
    if isinstance(node, (ast.BinOp, ast.Call)) and node.end_lineno is not None and node.end_col_offset is not None:
        index.setdefault((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset), (node, scope))
    if isinstance(node, ast.ClassDef):
        scope = _Scope(file=scope.file, owner=node, function=None)
    elif isinstance(node, Function):
        scope = _Scope(file=scope.file, owner=scope.owner, function=node)
    for child in ast.iter_child_nodes(node):
        _collect(child, scope, index)
