"""Where the damage was born: from the first non-finite tensor back along the flow of data.

In: the traced operations of both runs. Out: `Birth`s, the likeliest first, and the chain from the birth to the symptom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nandoctor.causes.base import feeds_product, is_constant, is_log_of_mask, writes_infinity
from nandoctor.diagnosis.layer_comparison import differs
from nandoctor.evidence.trace import OpCall, OpTensor, TensorStats, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """An op that made non-finite values, and the same op of the fp32 run (None where that took another way).

    `turned` tells that its inputs were infinite already, on purpose: it made NaN of them, or overflowed beside them.
    """

    op: OpCall
    twin: OpCall | None
    turned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Everything non-finite that leads to one symptom.

    `births` stand in the order of execution; `written` are those that are meant, masks and the like. `outside` are the
    non-finite tensors that came from outside the traced ops (weights, buffers, the batch), each with the op that took
    it. `ops` are all that handed non-finite values on, the last of them to the `symptom`. `complete` is False where a
    non-finite tensor came from before the traced span.
    """

    births: tuple[Birth, ...]
    written: tuple[Birth, ...]
    outside: tuple[tuple[OpCall, OpTensor], ...]
    ops: tuple[OpCall, ...]
    symptom: int
    complete: bool

    @property
    def members(self) -> frozenset[int]:
        """The orders of all ops involved."""
        return frozenset(op.order for op in self.ops)

    def way_from(self, start: int) -> tuple[OpCall, ...]:
        """One way along which the damage went from the op `start` to the symptom, the shortest."""
        ops = {op.order: op for op in self.ops}
        ways: dict[int, tuple[int, ...]] = {start: (start,)}
        for op in self.ops:
            reached = [ways[tensor.producer] for tensor in _bad_inputs(op) if tensor.producer in ways]
            if reached and op.order not in ways:
                ways[op.order] = (*min(reached, key=len), op.order)
        return tuple(ops[order] for order in ways.get(self.symptom, (start,)))


def trace_back(ops: tuple[OpCall, ...], reference: Trace, symptoms: Sequence[int]) -> Lineage:
    """Follow non-finite tensors from the ops `symptoms` (their orders) back to where they were born."""
    twins = {op.key: op for op in reference.ops}
    sliced = _slice(ops, symptoms)
    outside = [(op, tensor) for op in sliced for tensor in _bad_inputs(op) if tensor.producer is None]
    candidates = [Birth(op=op, twin=twins.get(op.key), turned=bool(_bad_inputs(op))) for op in sliced]
    births = _without_followers([birth for birth in candidates if _is_born(birth, ops, reference)], sliced)
    turned = [birth for birth in candidates if birth.turned and _turns_to_nan(birth.op)]
    written = [birth for birth in candidates if not birth.turned and birth not in births]
    misused = [birth for birth in written if writes_infinity(birth.op) and feeds_product(birth.op, sliced)]
    return Lineage(
        births=tuple(births or turned or misused),
        written=tuple(written),
        outside=tuple(outside),
        ops=tuple(sliced),
        symptom=symptoms[-1],
        complete=all(tensor.origin != "unknown" or is_constant(tensor) for _, tensor in outside),
    )


def find_swallowed(trace: Trace, reference: Trace) -> tuple[Birth, ...]:
    """The births that fp32 does not have, and that were swallowed by an op which then gave other values than fp32's.

    What a clamp or a saturating function was there to cut comes out the same in both, and is left in peace.
    """
    twins = {op.key: op for op in reference.ops}
    births = (Birth(op=op, twin=twins.get(op.key), turned=False) for op in trace.ops if op.exam and not _bad_inputs(op))
    return tuple(
        birth
        for birth in births
        if not _is_meant(birth, trace.ops, reference) and _is_missed(birth.op, trace.ops, twins)
    )


def _is_missed(born: OpCall, ops: tuple[OpCall, ...], twins: Mapping[tuple[str, int, str, int], OpCall]) -> bool:
    """Whether an op downstream of `born` made finite values of its infinities that fp32 does not have there."""
    carriers = {born.order}
    for op in ops:
        taken = [tensor.stats for tensor in _bad_inputs(op) if tensor.producer in carriers]
        if not all(stats.finite for stats in op.outputs):
            carriers |= {op.order} if taken else set()
        elif any(stats is not None and _swallows_wrongly(op, stats, twins.get(op.key)) for stats in taken):
            return True
    return False


def _swallows_wrongly(op: OpCall, taken: TensorStats, twin: OpCall | None) -> bool:
    if twin is None:
        return True
    pairs = zip(op.outputs, twin.outputs, strict=False)
    return any(differs((_at_infinities(ours, taken),), (_at_infinities(theirs, taken),)) for ours, theirs in pairs)


def _at_infinities(made: TensorStats, taken: TensorStats) -> TensorStats:
    """The sample of an output, only where that of an input of the same shape is infinite."""
    if made.sample is None or taken.sample is None or made.shape != taken.shape:
        return made
    return replace(made, sample=made.sample[~np.isfinite(taken.sample)])


def _slice(ops: tuple[OpCall, ...], symptoms: Sequence[int]) -> list[OpCall]:
    """The ops that handed non-finite values on to `symptoms`, themselves included, in the order of execution."""
    seen, waiting = set(), [*symptoms]
    while waiting:
        order = waiting.pop()
        if order in seen:
            continue
        seen.add(order)
        waiting += [tensor.producer for tensor in _bad_inputs(ops[order]) if tensor.producer is not None]
    return [ops[order] for order in sorted(seen)]


def _bad_inputs(op: OpCall) -> list[OpTensor]:
    return [tensor for tensor in op.inputs if tensor.stats is not None and not tensor.stats.finite]


def _turns_to_nan(op: OpCall) -> bool:
    """Whether infinities went in and NaN came out; only such ops are examined among those with bad inputs."""
    return op.exam is not None and "nan" in op.exam.kinds


def _is_born(birth: Birth, ops: Sequence[OpCall], reference: Trace) -> bool:
    """Whether the op made values that are not meant: of finite ones, or by overflowing beside infinities."""
    if not birth.turned:
        return not _is_meant(birth, ops, reference)
    return _overflows(birth.op) and not (reference.finite and birth.twin is not None and _overflows(birth.twin))


def _without_followers(births: list[Birth], sliced: Sequence[OpCall]) -> list[Birth]:
    """The births without those that overflowed beside infinities which another of them had made."""
    spoilt = {birth.op.order for birth in births if not birth.turned}
    follows = set()
    for op in sliced:
        if any(tensor.producer in spoilt for tensor in _bad_inputs(op)):
            follows.add(op.order)
            spoilt.add(op.order)
    return [birth for birth in births if not birth.turned or birth.op.order not in follows]


def _overflows(op: OpCall) -> bool:
    return op.exam is not None and op.exam.num_exact_finite > 0


def _is_meant(birth: Birth, ops: Sequence[OpCall], reference: Trace) -> bool:
    """An infinity that the code wrote down itself, or that a healthy fp32 run has at the same place."""
    kinds = birth.op.exam.kinds if birth.op.exam else ()
    if "nan" in kinds:
        return False
    if writes_infinity(birth.op) or is_log_of_mask(birth.op, ops):
        return True
    twin = birth.twin
    return reference.finite and twin is not None and not all(stats.finite for stats in twin.outputs)
