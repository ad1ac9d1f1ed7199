"""Checks that code uses powers only as shares of their sum, which a common factor does not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import libcst as cst

from nandoctor.evidence.trace import OpCall
from nandoctor.fixes.source_definitions import Definitions, in_loop, only_call
from nandoctor.fixes.source_expression import CannotWriteError, Expression, FileChange, number_in, operand_text
from nandoctor.fixes.source_tree import SourceTree, name_called, nodes_in
from nandoctor.ops import CASTS

_Kind = Literal["powers", "masked", "sum", "masked sum", "linear"]
"""The powers times numbers, or times a mask; the sum of just these; anything else that is linear in the powers.

The largest unmasked exponent may be so much smaller that its power rounds to 0: an eps has to keep that sum off 0.
"""
_SUM_OF: Mapping[_Kind, _Kind] = {"powers": "sum", "masked": "masked sum"}
_Flow = tuple[cst.CSTNode, _Kind]
_DIVIDES = frozenset({"div", "divide", "true_divide"})
_KEEP = CASTS | {"float", "double", "half", "bfloat16", "contiguous", "clone", "unsqueeze", "squeeze", "transpose"}
_LINEAR = frozenset({"matmul", "bmm", "mm", "mul"})
_CLAMPS = frozenset({"clamp", "clamp_min"})
_NO_VALUES = frozenset({"shape", "dtype", "device", "ndim"})


def subtract_largest(change: FileChange, expression: Expression, ops: Sequence[OpCall]) -> None:
    """Subtract the largest exponent along the dimensions that the powers are summed over: the shares stay the same.

    An eps that keeps the sum off 0 gets the same factor. With an eps, a negative largest exponent is not subtracted,
    so that a row of -inf still gives 0.

    Raises:
        CannotWriteError: the powers are not only used as shares, or there is no such sum among the `ops`.
    """
    tree, bounds = change.tree, check_shares(change.tree, expression.node, change.file)
    summed = next(_sums_of(expression.op, ops), None) if expression.op is not None else None
    if summed is None:
        raise CannotWriteError
    dims = [f"{value:g}" for name, value in summed.scalars if name.partition("[")[0] == "dim"]
    over = dims[0] if len(dims) == 1 else f"({', '.join(dims)})"
    exponent = expression.argument_node("self")
    first, again, before = change.named(exponent, tree.code(exponent), "logits")
    largest = f"{again}.amax({over}, keepdim=True)"
    if bounds:
        keeps_dims = len(summed.outputs[0].shape) == len(summed.inputs[0].stats.shape)  # type: ignore[union-attr]
        is_elsewhere = any(tree.scope_of(bound) is not tree.scope_of(exponent) for bound in bounds)
        if is_elsewhere or tree.statement_of(exponent) is None:
            raise CannotWriteError
        name = change.new_name("largest", exponent)
        largest, before = name, (*before, f"{name} = {largest}.clamp(min=0).detach()")
        for bound in bounds:
            factor = name if keeps_dims else f"{name}.squeeze({over})"
            change.replace(bound, f"{operand_text(tree, bound)} * torch.exp(-{factor})")
    else:
        largest = f"{largest}.detach()"
    change.replacements.extend(expression.with_texts({exponent: f"{first} - {largest}"}, before))


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


def check_shares(tree: SourceTree, powers: cst.CSTNode, file: Path) -> tuple[cst.BaseExpression, ...]:
    """Check that all that the code makes of the powers, even where it did not run, is divided by a sum of just them.

    Returns the bounds that keep such a sum off 0, which need the same factor as the powers.

    Raises:
        CannotWriteError: something else is computed from them, or may be, as far as the code shows.
    """
    kinds: dict[cst.CSTNode, _Kind] = {}
    quotients: dict[cst.CSTNode, tuple[cst.CSTNode, cst.CSTNode]] = {}
    waiting: list[_Flow] = [(powers, "powers")]
    while waiting:
        node, kind = waiting.pop()
        if node in kinds:
            raise CannotWriteError  # a product of two
        kinds[node] = kind
        parent = next(tree.ancestors(node))
        holder = next(tree.ancestors(parent)) if isinstance(parent, cst.Attribute | cst.Arg) else parent
        sides = None
        with suppress(CannotWriteError):
            sides = sides_of_quotient(tree, holder, None)
        if sides is not None and node in sides:
            if node is sides[1] and kind != "sum":
                raise CannotWriteError
            quotients[holder] = sides
        else:
            waiting.extend(_flows(tree, node, parent, kind, file))
        if not waiting:  # a quotient by another number is no share yet: follow it further
            left = (item for item, (_, divisor) in quotients.items() if divisor not in kinds and item not in kinds)
            waiting.extend((item, "linear") for item in left)
    if any(numerator not in kinds for numerator, _ in quotients.values()):
        raise CannotWriteError
    bounds = (_kept_off_zero_by(node, kinds) for node in kinds if kinds[node] == "sum")
    return tuple(bound for bound in bounds if bound is not None)


def _kept_off_zero_by(node: cst.CSTNode, kinds: Mapping[cst.CSTNode, _Kind]) -> cst.BaseExpression | None:
    """Return the other term of an addition, or the bound of a clamp; None for anything else."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
        return node.right if node.left in kinds else node.left
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in _CLAMPS:
        return node.args[-1].value
    return None


def sides_of_quotient(
    tree: SourceTree, node: cst.CSTNode, op: OpCall | None
) -> tuple[cst.BaseExpression, cst.BaseExpression]:
    """Return the numerator and the divisor of `x / y`, `x.div(y)` or `torch.div(x, y)`. Raises CannotWriteError."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
        return node.left, node.right
    if isinstance(node, cst.Call) and name_called(node) in _DIVIDES:
        expression = Expression(tree, node, op, "div")
        if len(expression.texts_after_first()) == 1:  # no rounding
            return expression.argument_node("self"), expression.argument_node("other")
    raise CannotWriteError


def is_zero(node: cst.BaseExpression) -> bool:
    """Return True if an expression is 0 or a tensor of zeros."""
    return number_in(node) == 0 or name_called(node) in ("zeros", "zeros_like", "new_zeros")


def _flows(tree: SourceTree, node: cst.CSTNode, parent: cst.CSTNode, kind: _Kind, file: Path) -> Iterator[_Flow]:
    """Yield what the expression or statement around a value computes from it."""
    if isinstance(parent, cst.BinaryOperation):
        other = parent.right if node is parent.left else parent.left
        is_number, operator = number_in(other) is not None, parent.operator
        if isinstance(operator, cst.Add) and kind.endswith("sum"):
            yield parent, "sum"
        elif isinstance(operator, cst.Multiply) and (is_number or kind in _SUM_OF):
            yield parent, kind if is_number else "masked"
        elif isinstance(operator, cst.Multiply | cst.MatrixMultiply):
            yield parent, "linear"
        else:
            raise CannotWriteError
    elif isinstance(parent, cst.Attribute | cst.Arg):
        yield from _called_with(tree, node, parent, kind)
    elif isinstance(parent, cst.Subscript) and node is parent.value:
        yield parent, kind if kind.endswith("sum") else "linear"
    elif isinstance(parent, cst.Assign) and node is parent.value:
        yield from ((read, kind) for read in _reads_of(tree, parent))
    elif isinstance(parent, cst.Return) and (function := tree.function_of(node)) is not None:
        yield only_call(tree, function, file), kind
    else:
        raise CannotWriteError


def _called_with(tree: SourceTree, node: cst.CSTNode, parent: cst.Attribute | cst.Arg, kind: _Kind) -> Iterator[_Flow]:
    """Yield what a method of a value, or a torch function called with it, computes."""
    if isinstance(parent, cst.Attribute) and parent.attr.value in _NO_VALUES:
        return
    call = next(tree.ancestors(parent))
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
        raise CannotWriteError
    is_method = call.func is parent
    is_function = isinstance(parent, cst.Arg) and tree.code(call.func).startswith("torch.")
    if not (is_method or is_function):
        raise CannotWriteError
    name, is_first = call.func.attr.value, is_method or parent is call.args[0]
    if name == "sum" and is_first:
        yield call, _SUM_OF.get(kind, "linear") if len(call.args) > is_function else "linear"
    elif name in _CLAMPS and is_first and kind.endswith("sum") and len(call.args) == 1 + is_function:
        yield call, "sum"
    elif name in _KEEP and is_first:
        yield call, kind
    elif name in _LINEAR:
        yield call, "linear"
    else:
        raise CannotWriteError


def _reads_of(tree: SourceTree, assignment: cst.Assign) -> Iterator[cst.Name]:
    """Yield the places that read what an assignment binds. Raises CannotWriteError if one of them is not certain."""
    target, function = assignment.targets[0].target, tree.function_of(assignment)
    if len(assignment.targets) != 1 or not isinstance(target, cst.Name) or function is None:
        raise CannotWriteError
    definitions = Definitions(tree, function)
    for name in nodes_in(function.body):
        if not isinstance(name, cst.Name) or name.value != target.value or definitions.is_no_read(name):
            continue
        value = definitions.value_of(name)
        if value is assignment.value:
            yield name
        elif value is None and (in_loop(tree, assignment) or tree.start_of(name) >= tree.end_of(assignment)):
            raise CannotWriteError
