"""Audits the small constants of a run: their values in the format they were used in, and whether they had an effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from nandoctor.causes.base import is_written
from nandoctor.changes.places import ancestors, singular_inputs
from nandoctor.evidence.dump_summary import OptimizerSlot
from nandoctor.evidence.formats import FP32, LARGEST_EPS, FloatFormat, effect_of
from nandoctor.evidence.report import EpsUse
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CLAMPS, EPS_IN_FP32, EPS_IN_INPUT, FILLS, MAXIMA, PRODUCTS, SCALINGS, SUMS

_FILLINGS = ("fill_value", "value", "self", "other")
_DEPTH = 6


def audit(
    ops: Sequence[OpCall], slots: Sequence[OptimizerSlot] = (), optimizer_eps: Sequence[float] = ()
) -> tuple[EpsUse, ...]:
    """Return every constant that the `ops` of one run use, once for each line, format and value.

    `optimizer_eps` are those of the optimizer's groups; they can be judged only with `slots`.
    """
    by_order = {op.order: op for op in ops}
    guards = _guards(ops, by_order)
    seen = [use for op in ops for use in _uses(op, by_order, guards)]
    judged = [_in_optimizer(slot) for slot in slots]
    unjudged = [_of_optimizer(eps) for eps in optimizer_eps if eps not in {use.value for use in judged}]
    return fold([*seen, *judged, *unjudged])


def _uses(op: OpCall, ops: Mapping[int, OpCall], guards: frozenset[int]) -> Iterator[EpsUse]:
    for name, number in op.scalars:
        value = _eps_in(op, name, number)
        # An eps only if it guards a divisor, root or logarithm: 1e-4 may be a step, 0.9999 a momentum.
        needs_guard = op.op in FILLS or (op.op in SCALINGS | SUMS and name == "other")
        if value is None or not is_written(op, name, ops) or (needs_guard and op.order not in guards):
            continue
        use = EpsUse(place="op", module=op.module, type=op.type, name=name, value=value, op=op.op, source=op.source)
        use = _in_format(use, _format_used(op))
        if _is_beside_one(op, name, number):
            rounded = abs(1 - _format_used(op).round(number))
            use = replace(
                use,
                name=f"1 - {name}" if number < 1 else f"{name} - 1",
                rounded=rounded,
                effect="normal" if rounded else "zero",
                rel_err=abs(rounded / value - 1),
            )
        yield replace(use, absorbed_share=_absorbed_share(op, name), bound_share=_bound_share(op, name))


def _eps_in(op: OpCall, name: str, value: float) -> float | None:
    """Return the argument as an eps, or None if this op uses it for something else."""
    beside_one = _is_beside_one(op, name, value)
    if beside_one:
        value = float(f"{abs(1 - value):.6g}")
    elif op.op in CLAMPS and name == "max" and isfinite(value):
        value = -value
    is_eps = (
        beside_one
        or name == "eps"
        or (op.op in CLAMPS and name in ("min", "max"))
        or (op.op in MAXIMA and name in ("self", "other"))
        or (op.op in FILLS and name in _FILLINGS)
        or (op.op in SUMS and name == "other")
    )
    return value if is_eps and 0 < value <= LARGEST_EPS else None


def _is_beside_one(op: OpCall, name: str, number: float) -> bool:
    """Return True if the number is one plus or minus an eps: a bound, or the 0.99999 of `p * (1 - 1e-5)`."""
    is_bound = op.op in CLAMPS and name == "max" and number > 0
    return is_bound or (op.op in SCALINGS | SUMS and name == "other" and 0 < abs(1 - number) <= LARGEST_EPS)


def _guards(ops: Iterable[OpCall], by_order: Mapping[int, OpCall]) -> frozenset[int]:
    """Return the ops whose results reach a divisor, root or logarithm without a product on the way."""
    through = frozenset(op.op for op in ops) - PRODUCTS.keys()
    guarded: set[int] = set()
    for op in ops:
        for tensor in singular_inputs(op):
            guarded.update(behind.order for behind in ancestors(by_order, tensor, _DEPTH, through=through))
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


def _samples(op: OpCall) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Return the same elements before and after the op, finite in both; None without any, or if the shapes differ."""
    before = next((t.stats for t in op.inputs if t.stats is not None and t.name in ("self", "input")), None)
    after = op.outputs[0]
    if before is None or before.shape != after.shape or before.sample is None or after.sample is None:
        return None
    finite = np.isfinite(before.sample) & np.isfinite(after.sample)
    return (before.sample[finite], after.sample[finite]) if finite.any() else None


def _absorbed_share(op: OpCall, name: str) -> float | None:
    pair = _samples(op) if op.op in ("add", "sub") and name == "other" else None
    return None if pair is None else float(np.mean(pair[0] == pair[1]))


def _bound_share(op: OpCall, name: str) -> float | None:
    number = dict(op.scalars)[name]
    pair = _samples(op) if op.op in CLAMPS or (op.op in MAXIMA and name == "other") else None
    if pair is None:
        return None
    return float(np.mean(pair[0] > number if name == "max" else pair[0] < number))


def _of_optimizer(eps: float) -> EpsUse:
    return EpsUse(place="optimizer", module="", type="", name="eps", value=eps)


def _in_optimizer(slot: OptimizerSlot) -> EpsUse:
    use = _of_optimizer(slot.eps)
    if not slot.eps:
        return use
    use = _in_format(use, slot.moment.dtype)
    if slot.moment.sample is None:
        return use
    # The root of a second moment is rounded to its own format before the eps is added.
    roots = np.sqrt(np.abs(slot.moment.sample))
    return replace(use, absorbed_share=float(np.mean(roots >= slot.moment.dtype.absorbed_from(slot.eps))))


def fold(uses: Iterable[EpsUse]) -> tuple[EpsUse, ...]:
    """Merge uses of the same number in the same format, on the same line or in layers of one type."""
    groups: dict[tuple[object, ...], list[EpsUse]] = {}
    for use in uses:
        line = (use.source.file, use.source.line) if use.source else use.type
        groups.setdefault((use.place, line, use.name, use.value, use.op, use.dtype), []).append(use)
    return tuple(
        replace(
            group[0],
            num_uses=len(group),
            absorbed_share=_mean(use.absorbed_share for use in group),
            bound_share=_mean(use.bound_share for use in group),
        )
        for group in groups.values()
    )


def _mean(shares: Iterable[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None
