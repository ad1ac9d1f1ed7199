"""Checks that code uses powers only as shares of their sum, which a common factor does not change."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Literal

from nandoctor.changes.definitions import Definitions, in_loop, nodes_in_body
from nandoctor.changes.editor import Editor
from nandoctor.changes.expression import Expression, number_in
from nandoctor.changes.source_tree import CannotWriteError, SourceTree, name_called
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CASTS

_Kind = Literal["powers", "sum", "linear"]
"""The powers times numbers; the sum of just these; anything else that is linear in the powers."""
_Flow = tuple[ast.AST, _Kind]
_DIVIDES = frozenset({"div", "divide", "true_divide"})
_KEEP = CASTS | {"float", "double", "half", "bfloat16", "contiguous", "clone", "unsqueeze", "squeeze", "transpose"}
_LINEAR = frozenset({"matmul", "bmm", "mm", "mul"})
_NO_VALUES = frozenset({"shape", "dtype", "device", "ndim"})


def subtract_largest(expression: Expression, ops: Sequence[OpCall]) -> None:
    """Subtract the largest exponent along the dimensions that the powers are summed over: the shares stay the same.

    Raises:
        CannotWriteError: the powers are not only used as shares, or there is no such sum among the `ops`.
    """
    check_shares(expression.editor, expression.node)
    summed = next(_sums_of(expression.op, ops), None) if expression.op is not None else None
    if summed is None:
        raise CannotWriteError
    dims = [f"{value:g}" for name, value in summed.scalars if name.partition("[")[0] == "dim"]
    over = dims[0] if len(dims) == 1 else f"({', '.join(dims)})"
    exponent = expression.argument_node("self")
    first, again, before = expression.editor.named(exponent, expression.editor.code(exponent), "logits")
    largest = f"{again}.amax({over}, keepdim=True).detach()"
    expression.editor.replace(exponent, f"{first} - {largest}", before)


def _sums_of(power: OpCall, ops: Sequence[OpCall]) -> Iterator[OpCall]:
    """Yield the sums along some dimensions of an op's output, or of its products with factors, in the same shape."""
    shape, made = power.outputs[0].shape, {power.order}
    for op in ops:
        if op.order > power.order and any(taken.producer in made for taken in op.inputs):
            taken = next(taken for taken in op.inputs if taken.producer in made)
            is_along = any(name.partition("[")[0] == "dim" for name, _ in op.scalars)
            if op.op == "sum" and is_along and taken.stats is not None and taken.stats.shape == shape:
                yield op
            if op.op in CASTS | {"mul", "clone"}:
                made.add(op.order)


def check_shares(change: Editor, powers: ast.AST) -> None:
    """Check that all that the code makes of the powers, even where it did not run, is divided by a sum of just them.

    An eps beside that sum would need the same factor as the powers.

    Raises:
        CannotWriteError: something else is computed from them, or may be, as far as the code shows.
    """
    tree = change.tree
    kinds: dict[ast.AST, _Kind] = {}
    quotients: dict[ast.AST, tuple[ast.AST, ast.AST]] = {}
    waiting: list[_Flow] = [(powers, "powers")]
    while waiting:
        node, kind = waiting.pop()
        if node in kinds:
            raise CannotWriteError  # a product of two
        kinds[node] = kind
        parent = next(tree.ancestors(node))
        holder = next(tree.ancestors(parent)) if isinstance(parent, ast.Attribute | ast.keyword) else parent
        sides = None
        with suppress(CannotWriteError):
            sides = sides_of_quotient(change, holder, None)
        if sides is not None and node in sides:
            if node is sides[1] and kind != "sum":
                raise CannotWriteError
            quotients[holder] = sides
        else:
            waiting.extend(_flows(change, node, parent, kind))
        if not waiting:  # a quotient by another number is no share yet: follow it further
            left = (item for item, (_, divisor) in quotients.items() if divisor not in kinds and item not in kinds)
            waiting.extend((item, "linear") for item in left)
    if any(numerator not in kinds for numerator, _ in quotients.values()):
        raise CannotWriteError


def sides_of_quotient(change: Editor, node: ast.AST, op: OpCall | None) -> tuple[ast.expr, ast.expr]:
    """Return the numerator and the divisor of `x / y`, `x.div(y)` or `torch.div(x, y)`. Raises CannotWriteError."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left, node.right
    if isinstance(node, ast.Call) and name_called(node) in _DIVIDES:
        expression = Expression(change, node, op, "div")
        if len(expression.texts_after_first()) == 1:  # no rounding
            return expression.argument_node("self"), expression.argument_node("other")
    raise CannotWriteError


def _flows(change: Editor, node: ast.AST, parent: ast.AST, kind: _Kind) -> Iterator[_Flow]:
    """Yield what the expression or statement around a value computes from it."""
    tree = change.tree
    if isinstance(parent, ast.BinOp):
        other = parent.right if node is parent.left else parent.left
        is_number, operator = number_in(other) is not None, parent.op
        if isinstance(operator, ast.Mult) and is_number:
            yield parent, kind
        elif isinstance(operator, ast.Mult | ast.MatMult):
            yield parent, "linear"
        else:
            raise CannotWriteError
    elif isinstance(parent, ast.Attribute | ast.Call | ast.keyword):
        yield from _called_with(tree, node, parent, kind)
    elif isinstance(parent, ast.Subscript) and node is parent.value:
        yield parent, "sum" if kind == "sum" else "linear"
    elif isinstance(parent, ast.Assign) and node is parent.value:
        yield from ((read, kind) for read in _reads_of(tree, parent))
    else:
        raise CannotWriteError


def _called_with(tree: SourceTree, node: ast.AST, parent: ast.AST, kind: _Kind) -> Iterator[_Flow]:
    """Yield what a method of a value, or a torch function called with it, computes."""
    if isinstance(parent, ast.Attribute) and parent.attr in _NO_VALUES:
        return
    call = parent if isinstance(parent, ast.Call) else tree.parent(parent)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        raise CannotWriteError
    is_method = call.func is parent
    is_function = not isinstance(parent, ast.Attribute) and tree.code(call.func).startswith("torch.")
    if not (is_method or is_function):
        raise CannotWriteError
    num_given = len(call.args) + len(call.keywords)
    name, is_first = call.func.attr, is_method or node is next(iter(call.args), None)
    if name == "sum" and is_first:
        yield call, "sum" if kind == "powers" and num_given > is_function else "linear"
    elif name in _KEEP and is_first:
        yield call, kind
    elif name in _LINEAR:
        yield call, "linear"
    else:
        raise CannotWriteError


def _reads_of(tree: SourceTree, assignment: ast.Assign) -> Iterator[ast.Name]:
    """Yield the places that read what an assignment binds. Raises CannotWriteError if one of them is not certain."""
    target, function = assignment.targets[0], tree.function_of(assignment)
    if len(assignment.targets) != 1 or not isinstance(target, ast.Name) or function is None:
        raise CannotWriteError
    definitions = Definitions(tree, function)
    for name in nodes_in_body(function):
        if not isinstance(name, ast.Name) or name.id != target.id or definitions.is_target(name):
            continue
        value = definitions.value_of(name)
        if value is assignment.value:
            yield name
        elif value is None and (in_loop(tree, assignment) or tree.span(name)[0] >= tree.span(assignment)[1]):
            raise CannotWriteError
