"""Subtracts the largest exponent of powers that a run uses only as shares of their sum, which stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nandoctor.changes.expression import Expression
from nandoctor.changes.source_tree import CannotWriteError
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CASTS, MOVES, PRODUCTS, is_factor

_ELEMENTWISE = CASTS | {"clone", "contiguous", "mul", "div"}
_SUMS = frozenset({"sum", "mean", "cumsum"})
_ADDS = _SUMS | {"add", "sub", "index_add", "scatter_add"}


def subtract_largest(expression: Expression, ops: Sequence[OpCall]) -> None:
    """Subtract the largest exponent along the dimensions that the powers are summed over, else the largest of all.

    Raises:
        CannotWriteError: the run with these `ops` makes something of the powers that changes with their factor.
    """
    site = expression.op.source if expression.op is not None else None
    powers = [op for op in ops if op.op == expression.op_name and op.source == site]
    if not powers or not all(_cancels(op, ops) for op in powers):
        raise CannotWriteError
    dims = {dim for op in powers for dim in _summed_over(op, ops)}
    along = f"{dims.pop()}, keepdim=True" if len(dims) == 1 and "" not in dims else ""
    exponent = expression.argument_node("self")
    first, again, before = expression.editor.named(exponent, expression.editor.code(exponent), "logits")
    expression.editor.replace(exponent, f"{first} - {again}.amax({along}).detach()", before)


def _cancels(power: OpCall, ops: Sequence[OpCall]) -> bool:
    """Return True if a common factor of an op's powers is gone from all that is made of them in the end."""
    degrees: dict[int | None, int] = {power.order: 1}
    left = {power.order}
    for op in (op for op in ops if op.phase != "backward"):
        taken = [tensor for tensor in op.inputs if tensor.producer in degrees]
        degree = _degree_of(op, {tensor.name: degrees[tensor.producer] for tensor in taken}) if taken else 0
        if degree is None:
            return False
        left -= {tensor.producer for tensor in taken if tensor.producer is not None}
        if degree:
            degrees[op.order] = degree
            left.add(op.order)
    return not left


def _degree_of(op: OpCall, taken: dict[str, int]) -> int | None:
    """Return how often a result has the factor that inputs have so often, by their names; None if it mixes them."""
    if op.op == "div":
        return sum(-degree if name == "other" else degree for name, degree in taken.items())
    if op.op == "mul" or (op.op in PRODUCTS and all(is_factor(op.op, tensor.name) for tensor in op.inputs)):
        return sum(taken.values())
    others = (tensor.stats.absmax for tensor in op.inputs if tensor.stats is not None and tensor.name not in taken)
    is_alike = len(set(taken.values())) == 1 and not any(others) and "other" not in dict(op.scalars)
    return next(iter(taken.values())) if is_alike and op.op in MOVES | CASTS | _ADDS else None


def _summed_over(power: OpCall, ops: Sequence[OpCall]) -> Iterator[str]:
    """Yield the dimensions of each sum of the powers, at most multiplied, as code; "" if those are all."""
    powers = {power.order}
    for op in (op for op in ops if op.inputs and op.inputs[0].producer in powers and op.phase != "backward"):
        if op.op in _ELEMENTWISE:
            powers.add(op.order)
        elif op.op in _SUMS:
            dims = [f"{value:g}" for name, value in op.scalars if name.partition("[")[0] == "dim"]
            yield dims[0] if len(dims) == 1 else f"({', '.join(dims)})" if dims else ""
