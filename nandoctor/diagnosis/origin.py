"""The ops that made the non-finite values: back from the first of them along the flow of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nandoctor.causes.base import feeds_product, is_constant, is_log_of_mask, writes_infinity
from nandoctor.diagnosis.layer_comparison import differs
from nandoctor.evidence.trace import OpCall, OpTensor, TensorStats, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteSource:
    """An op that made non-finite values, and the same op of the fp32 run (None where that took another way).

    `had_inf_input` tells that its inputs were infinite already, on purpose: it made NaN of them, or overflowed.
    """

    op: OpCall
    reference_op: OpCall | None
    had_inf_input: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteTrace:
    """Everything non-finite that leads to one symptom.

    `sources` stand in the order of execution; `written` are those that are meant, masks and so on. `outside` are the
    non-finite tensors that came from outside the traced ops (weights, buffers, the batch), each with the op that took
    it. `ops` are all that handed non-finite values on, the last of them to the `symptom`. `complete` is False where a
    non-finite tensor came from before the traced span.
    """

    sources: tuple[NonfiniteSource, ...]
    written: tuple[NonfiniteSource, ...]
    outside: tuple[tuple[OpCall, OpTensor], ...]
    ops: tuple[OpCall, ...]
    symptom: int
    complete: bool

    @property
    def members(self) -> frozenset[int]:
        """The orders of all ops involved."""
        return frozenset(op.order for op in self.ops)

    def way_from(self, start: int) -> tuple[OpCall, ...]:
        """The shortest way of non-finite values from the op `start` to the symptom."""
        ops = {op.order: op for op in self.ops}
        ways: dict[int, tuple[int, ...]] = {start: (start,)}
        for op in self.ops:
            reached = [ways[tensor.producer] for tensor in op.nonfinite_inputs if tensor.producer in ways]
            if reached and op.order not in ways:
                ways[op.order] = (*min(reached, key=len), op.order)
        return tuple(ops[order] for order in ways.get(self.symptom, (start,)))


def trace_back(ops: tuple[OpCall, ...], reference: Trace, symptoms: Sequence[int]) -> NonfiniteTrace:
    """Follow non-finite tensors from the ops `symptoms` (their orders) back to where they were made."""
    references = {op.key: op for op in reference.ops}
    sliced = _slice(ops, symptoms)
    outside = [(op, tensor) for op in sliced for tensor in op.nonfinite_inputs if tensor.producer is None]
    candidates = [
        NonfiniteSource(op=op, reference_op=references.get(op.key), had_inf_input=bool(op.nonfinite_inputs))
        for op in sliced
    ]
    sources = _without_followers([source for source in candidates if _is_created(source, ops, reference)], sliced)
    had_inf_input = [source for source in candidates if source.had_inf_input and _turns_to_nan(source.op)]
    written = [source for source in candidates if not source.had_inf_input and source not in sources]
    misused = [source for source in written if writes_infinity(source.op) and feeds_product(source.op, sliced)]
    return NonfiniteTrace(
        sources=tuple(sources or had_inf_input or misused),
        written=tuple(written),
        outside=tuple(outside),
        ops=tuple(sliced),
        symptom=symptoms[-1],
        complete=all(tensor.origin != "unknown" or is_constant(tensor) for _, tensor in outside),
    )


def find_swallowed(trace: Trace, reference: Trace) -> tuple[NonfiniteSource, ...]:
    """The sources that fp32 does not have, swallowed by an op that then gave other values than fp32's.

    What a clamp or a saturating function was there to cut comes out the same in both, and is left in peace.
    """
    references = {op.key: op for op in reference.ops}
    sources = (
        NonfiniteSource(op=op, reference_op=references.get(op.key), had_inf_input=False)
        for op in trace.ops
        if op.analysis and not op.nonfinite_inputs
    )
    return tuple(
        source
        for source in sources
        if not _is_meant(source, trace.ops, reference) and _is_missed(source.op, trace.ops, references)
    )


def _is_missed(source: OpCall, ops: tuple[OpCall, ...], references: Mapping[tuple[str, int, str, int], OpCall]) -> bool:
    """Tell whether an op downstream of `source` made finite values of its infinities that fp32 does not have there."""
    carriers = {source.order}
    for op in ops:
        taken = [tensor.stats for tensor in op.nonfinite_inputs if tensor.producer in carriers]
        if not all(stats.finite for stats in op.outputs):
            carriers |= {op.order} if taken else set()
        elif any(stats is not None and _swallows_wrongly(op, stats, references.get(op.key)) for stats in taken):
            return True
    return False


def _swallows_wrongly(op: OpCall, taken: TensorStats, reference_op: OpCall | None) -> bool:
    if reference_op is None:
        return True
    pairs = zip(op.outputs, reference_op.outputs, strict=False)
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
        waiting += [tensor.producer for tensor in ops[order].nonfinite_inputs if tensor.producer is not None]
    return [ops[order] for order in sorted(seen)]


def _turns_to_nan(op: OpCall) -> bool:
    """Tell whether infinities went in and NaN came out; of ops with non-finite inputs only such are examined."""
    return op.analysis is not None and "nan" in op.analysis.kinds


def _is_created(source: NonfiniteSource, ops: Sequence[OpCall], reference: Trace) -> bool:
    """Tell whether the op made values that are not meant: of finite ones, or by overflowing beside infinities."""
    if not source.had_inf_input:
        return not _is_meant(source, ops, reference)
    return _overflows(source.op) and not (
        reference.finite and source.reference_op is not None and _overflows(source.reference_op)
    )


def _without_followers(sources: list[NonfiniteSource], sliced: Sequence[OpCall]) -> list[NonfiniteSource]:
    """The sources without those that overflowed beside infinities which another of them had made."""
    spoilt = {source.op.order for source in sources if not source.had_inf_input}
    follows = set()
    for op in sliced:
        if any(tensor.producer in spoilt for tensor in op.nonfinite_inputs):
            follows.add(op.order)
            spoilt.add(op.order)
    return [source for source in sources if not source.had_inf_input or source.op.order not in follows]


def _overflows(op: OpCall) -> bool:
    return op.analysis is not None and op.analysis.num_exact_finite > 0


def _is_meant(source: NonfiniteSource, ops: Sequence[OpCall], reference: Trace) -> bool:
    """An infinity that the code wrote down itself, or that a healthy fp32 run has at the same place."""
    kinds = source.op.analysis.kinds if source.op.analysis else ()
    if "nan" in kinds:
        return False
    if writes_infinity(source.op) or is_log_of_mask(source.op, ops):
        return True
    reference_op = source.reference_op
    return reference.finite and reference_op is not None and not all(stats.finite for stats in reference_op.outputs)
