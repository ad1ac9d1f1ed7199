"""Audits the small constants of a run: what is left of them in the format they were used in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite

from nandoctor.causes.base import is_written
from nandoctor.changes.places import ancestors, singular_inputs
from nandoctor.evidence.dump_summary import OptimizerSlot
from nandoctor.evidence.formats import FP32, LARGEST_EPS, FloatFormat, effect_of
from nandoctor.evidence.report import EpsUse
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CLAMPS, EPS_IN_FP32, EPS_IN_INPUT, FILLS, MAXIMA, PRODUCTS, SUMS

_FILLINGS = ("fill_value", "value", "self", "other")
_DEPTH = 6


def audit(ops: Sequence[OpCall], slots: Sequence[OptimizerSlot] = ()) -> tuple[EpsUse, ...]:
    """Return every constant that the `ops` of one run and the optimizer use, once for each line, format and value."""
    guards = _guards(ops)
    seen = [use for op in ops for use in _uses(op, ops, guards)]
    for slot in slots:
        use = EpsUse(place="optimizer", module="", type="", name="eps", value=slot.eps)
        seen.append(_in_format(use, slot.moment.dtype) if slot.eps else use)
    groups: dict[tuple[object, ...], list[EpsUse]] = {}
    for use in seen:
        line = (use.source.file, use.source.line) if use.source else use.type  # or layers of one type
        groups.setdefault((use.place, line, use.name, use.value, use.op, use.dtype), []).append(use)
    return tuple(replace(group[0], num_uses=len(group)) for group in groups.values())


def _uses(op: OpCall, ops: Sequence[OpCall], guards: frozenset[int]) -> Iterator[EpsUse]:
    for name, number in op.scalars:
        value = _eps_in(op, name, number)
        # An eps only if it guards a divisor, root or logarithm: 1e-4 may be a step.
        needs_guard = op.op in FILLS or (op.op in SUMS and name == "other")
        if value is None or not is_written(op, name, ops) or (needs_guard and op.order not in guards):
            continue
        module, kind = op.place.module, op.place.type
        use = EpsUse(place="op", module=module, type=kind, name=name, value=value, op=op.op, source=op.source)
        yield _in_format(use, _format_used(op))


def _eps_in(op: OpCall, name: str, value: float) -> float | None:
    """Return the argument as an eps, or None if this op uses it for something else."""
    if op.op in CLAMPS and name == "max" and isfinite(value):
        value = -value  # the bound of what is negative
    is_eps = (
        name == "eps"
        or (op.op in CLAMPS and name in ("min", "max"))
        or (op.op in MAXIMA and name in ("self", "other"))
        or (op.op in FILLS and name in _FILLINGS)
        or (op.op in SUMS and name == "other")
    )
    return value if is_eps and 0 < value <= LARGEST_EPS else None


def _guards(ops: Sequence[OpCall]) -> frozenset[int]:
    """Return the ops whose results reach a divisor, root or logarithm without a product on the way."""
    through = frozenset(op.op for op in ops) - PRODUCTS.keys()
    guarded: set[int] = set()
    for op in ops:
        for tensor in singular_inputs(op):
            guarded.update(behind.order for behind in ancestors(ops, tensor, _DEPTH, through=through))
    return frozenset(guarded)


def _format_used(op: OpCall) -> FloatFormat:
    taken = [tensor.stats.dtype for tensor in op.inputs if tensor.stats is not None]
    if op.op in EPS_IN_INPUT and taken:
        return max(taken, key=lambda dtype: dtype.fraction_bits)
    own = op.outputs[0].dtype
    return max(own, FP32, key=lambda dtype: dtype.fraction_bits) if op.op in EPS_IN_FP32 else own


def _in_format(use: EpsUse, dtype: FloatFormat) -> EpsUse:
    rounded = dtype.round(use.value)
    rel_err = abs(rounded - use.value) / abs(use.value)
    return replace(use, dtype=dtype, rounded=rounded, rel_err=rel_err, effect=effect_of(rounded, dtype))
