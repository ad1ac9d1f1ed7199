"""Subtracts the largest exponent of powers that a run uses only as shares of their sum, which stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from nandoctor.changes.expression import Expression
from nandoctor.changes.source_tree import CannotWriteError
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CASTS, MOVES, PRODUCTS

_Kind = Literal["powers", "sum", "linear"]
"""The powers times numbers; the sum of just these; anything else that is linear in the powers."""
_COPIES = CASTS | {"clone", "contiguous"}


def subtract_largest(expression: Expression, ops: Sequence[OpCall]) -> None:
    """Subtract the largest exponent along the dimensions that the powers are summed over: the shares stay the same.

    Raises:
        CannotWriteError: the run with these `ops` makes something else of the powers.
    """
    site = expression.op.source if expression.op is not None else None
    dims = {_summed_over(op, ops) for op in ops if op.op == expression.op_name and op.source == site}
    if len(dims) != 1:
        raise CannotWriteError
    exponent = expression.argument_node("self")
    first, again, before = expression.editor.named(exponent, expression.editor.code(exponent), "logits")
    largest = f"{again}.amax({dims.pop()}, keepdim=True).detach()"
    expression.editor.replace(exponent, f"{first} - {largest}", before)


def _summed_over(power: OpCall, ops: Sequence[OpCall]) -> str:
    """Return the dimensions of the sum that everything made of an op's powers is divided by.

    Raises CannotWriteError if anything else is made of them: an eps beside that sum would need their factor as well.
    """
    kinds: dict[int | None, _Kind] = {power.order: "powers"}
    dims = set[str]()
    for op in ops:
        taken = {tensor.name: kinds[tensor.producer] for tensor in op.inputs if tensor.producer in kinds}
        if not taken or op.phase == "backward":
            continue
        if op.op == "div" and taken.keys() == {"self", "other"} and taken["other"] == "sum":
            continue  # a share
        kinds[op.order] = _kind_of(op, taken)
        if op.op == "sum" and kinds[op.order] == "sum":
            dims.add(_dims_of(op))
    if len(dims) != 1:
        raise CannotWriteError
    return dims.pop()


def _kind_of(op: OpCall, taken: Mapping[str, _Kind]) -> _Kind:
    """Return what an op makes of powers, by the names of its inputs. Raises CannotWriteError if that is not linear."""
    is_alone, kind = len(op.inputs) == 1, next(iter(taken.values()))
    if len(taken) > 1 or (op.op == "div" and "other" in taken):
        raise CannotWriteError
    if op.op == "sum":
        return "sum" if kind == "powers" and _dims_of(op) else "linear"
    if is_alone and (op.op in ("mul", "div") or op.op in _COPIES or (op.op in MOVES and kind == "sum")):
        return kind
    if op.op in ("mul", "div") or op.op in PRODUCTS or (is_alone and op.op in MOVES):
        return "linear"
    raise CannotWriteError


def _dims_of(op: OpCall) -> str:
    """Return the dimensions that an op sums over, as code; "" if those are all."""
    dims = [f"{value:g}" for name, value in op.scalars if name.partition("[")[0] == "dim"]
    return dims[0] if len(dims) == 1 else f"({', '.join(dims)})" if dims else ""
