"""Finds where a non-finite value first showed, traces it back to the ops that made it, and finds what removed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nandoctor.causes.base import (
    CausePhase,
    Finding,
    OutsideTensor,
    feeds_product,
    is_constant,
    is_log_of_mask,
    reached_ops,
    singular_edge,
    writes_infinity,
)
from nandoctor.causes.mask_constant_overflow import constant_in_fp32
from nandoctor.causes.registry import find_cause
from nandoctor.changes.places import ancestors, singular_inputs
from nandoctor.diagnosis.run_summary import outputs_differ
from nandoctor.evidence.dump_summary import OptimizerSlot
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import Diagnosis, FirstNonfinite, NonfiniteElements, Origin, Where
from nandoctor.evidence.trace import LOSS, ModuleCall, NonfiniteCounts, OpCall, OpTensor, Place, TensorStats, Trace
from nandoctor.ops import CASTS, MOVES, SCALINGS

_PHASES: dict[str, Literal["loss", "input"]] = {"batch": "input", "loss": "loss"}
_KEEP_ZERO, _DEPTH = MOVES | CASTS | SCALINGS | {"neg"}, 6


def find_nonfinite_places(trace: Trace, reference: Trace) -> list[FirstNonfinite]:
    """Return the non-finite tensors of `trace` that can matter, in the order of execution; the loss comes last.

    If the reference's output is finite, values of the same kinds at the same place in it are intended (attention masks)
    and left out.
    """
    run = "fp32" if trace is reference else "autocast"
    meant = {_key(it): it.value for it in _nonfinite_places(reference, "fp32")} if reference.finite else {}
    return [it for it in _nonfinite_places(trace, run) if not _is_in_both(it.value, meant.get(_key(it)))]


def _is_in_both(value: TensorStats, other: TensorStats | None) -> bool:
    """Return True if the reference has the same kinds of value here; without exact counts, any non-finite value."""
    if other is None or value.counts is None or other.counts is None:
        return other is not None
    return set(value.counts.kinds) <= set(other.counts.kinds)


def _nonfinite_places(trace: Trace, run: str) -> Iterator[FirstNonfinite]:
    def found(where: Where, value: TensorStats, owner: ModuleCall | None = None) -> FirstNonfinite:
        return FirstNonfinite(
            run=run,
            phase=_PHASES.get(where, "forward"),
            place=owner.place if owner else Place(module=LOSS if where == "loss" else "", type="", call=0),
            where=where,
            seen_in=None,
            elements=nonfinite_elements(value, trace),
            inputs=owner.inputs if owner else (),
            value=value,
            would_be=None,
            state=owner.state if owner else (),
        )

    yield from (found("batch", stats) for stats in trace.batch if not stats.finite)
    events = [(call.enter, call, call.inputs) for call in trace.calls]
    events += [(call.leave, call, call.outputs) for call in trace.calls if call.leave is not None]
    around: list[ModuleCall] = []  # a call that raised is left when the next one of its depth is entered
    for tick, call, tensors in sorted(events, key=lambda event: event[0]):
        nonfinite = [stats for stats in tensors if not stats.finite]
        if tick == call.leave:
            yield from (found("output", stats, call) for stats in nonfinite)
            continue
        del around[call.depth :]
        parent = around[-1] if around else None
        yield from (replace(found("between", stats, parent), seen_in=call.place) for stats in nonfinite)
        around.append(call)
    if trace.loss is not None and not trace.loss.finite:
        yield found("loss", trace.loss)


def _key(first: FirstNonfinite) -> object:
    """Return the identity of the tensor within a run, the same in other runs."""
    return (first.seen_in or first.place).key, first.where, first.value.path


def nonfinite_elements(
    stats: TensorStats, trace: Trace | None, counts: NonfiniteCounts | None = None
) -> NonfiniteElements:
    """Return a tensor's non-finite elements as far as they were counted, there or in `counts`.

    Samples are named if it has a row for each sample of the trace.
    """
    counts = counts or stats.counts
    if counts is None:
        return NonfiniteElements(kinds=(), num_bad=0, numel=stats.numel, first_index=None, samples=None)
    has_rows = trace is not None and trace.num_samples is not None and stats.shape[:1] == (trace.num_samples,)
    samples = counts.samples if has_rows and counts.samples else None
    return NonfiniteElements(
        kinds=counts.kinds,
        num_bad=counts.num_bad,
        numel=stats.numel,
        first_index=counts.first_bad_index,
        samples=samples,
        batch_size=None if trace is None else trace.num_samples,
    )


def needs_counts(trace: Trace) -> bool:
    """Return True if a non-finite tensor of the trace has no exact counts."""
    tensors = (stats for call in trace.calls for stats in (*call.inputs, *call.outputs))
    return any(stats.counts is None and not stats.finite for stats in tensors)


def describe_first(first: FirstNonfinite, reference: Trace, guilty: tuple[int, ...] | None) -> FirstNonfinite:
    """Return the first non-finite place with fp32's largest magnitude there.

    Its rows are samples if those to blame are among them.
    """
    elements = first.elements
    if guilty is None or not set(guilty) <= set(elements.samples or ()):
        elements = replace(elements, samples=None)
    is_call, key = first.where in ("output", "between"), (first.seen_in or first.place).key
    same = [call for call in reference.calls if call.key == key and is_call]
    tensors = (stats for call in same for stats in (call.outputs if first.where == "output" else call.inputs))
    would_be = next((stats.absmax for stats in tensors if stats.path == first.value.path), None)
    return replace(first, elements=elements, would_be=would_be)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteTrace:
    """The ops and tensors that lead to one non-finite symptom.

    `sources` are in the order of execution; `beside` are those whose infinities a later op took in other elements than
    those in which it made its own, and `written` are intended ones, such as masks. `outside` are non-finite
    tensors from outside the traced ops (weights, buffers, the batch), each with the op that took it; `outsized` those
    that the code made from a number that does not fit, with that number. `ops` are all that passed non-finite values
    on, up to the op of order `symptom`.
    """

    sources: tuple[Finding, ...]
    beside: tuple[Finding, ...]
    written: tuple[Finding, ...]
    outside: tuple[tuple[OpCall, OpTensor], ...]
    outsized: tuple[tuple[OpCall, OpTensor, float], ...]
    ops: tuple[OpCall, ...]
    symptom: int

    def way_from(self, start: int) -> tuple[OpCall, ...]:
        """Return the shortest path of non-finite values from the op `start` to the symptom."""
        ops = {op.order: op for op in self.ops}
        ways: dict[int, tuple[int, ...]] = {start: (start,)}
        for op in self.ops:
            reached = [ways[tensor.producer] for tensor in op.carried_inputs if tensor.producer in ways]
            if reached and op.order not in ways:
                ways[op.order] = (*min(reached, key=len), op.order)
        return tuple(ops[order] for order in ways.get(self.symptom, (start,)))


def trace_back(ops: tuple[OpCall, ...], reference: Trace, symptoms: Sequence[int], low: FloatFormat) -> NonfiniteTrace:
    """Trace non-finite tensors from the ops with the orders `symptoms` back to where they were made."""
    sliced = _slice(ops, symptoms)
    outside = [(op, tensor) for op in sliced for tensor in op.carried_inputs if tensor.producer is None]
    candidates = [*findings_of(sliced, ops, reference, low)]
    sources = [source for source in candidates if _is_created(source)]
    behind = [it for it in findings_of(_slice(ops, [*_absorbing(sources)]), ops, reference, low) if it.op.analysis]
    sources += [source for source in behind if source not in sources and _is_created(source)]
    absorbed = [it.producer for op in sliced for it in op.nonfinite_inputs if it.absorbed and it.producer is not None]
    beside = findings_of(_slice(ops, absorbed), ops, reference, low)
    # Ops that made NaN from infinities are sources only if there are no others.
    examined = [source for source in candidates if source.had_inf_input and source.op.analysis]
    had_inf_input = [source for source in examined if "nan" in source.analysis.kinds]
    written = [source for source in candidates if not source.had_inf_input and source not in sources]
    misused = [source for source in written if writes_infinity(source.op) and feeds_product(source.op, sliced)]
    numbers = [
        (op, tensor, constant_in_fp32(tensor, reference.by_key.get(op.key)))
        for op, tensor in outside
        if is_constant(tensor)
    ]
    outsized = [(op, tensor, number) for op, tensor, number in numbers if number is not None]
    return NonfiniteTrace(
        sources=tuple(sources or ([] if outsized else had_inf_input or misused)),
        beside=tuple(it for it in beside if it.op.analysis and it not in candidates + behind and _is_created(it)),
        written=tuple(written),
        outside=tuple(outside),
        outsized=tuple(outsized),
        ops=(*(source.op for source in behind), *sliced),
        symptom=symptoms[-1],
    )


def findings_of(made: Iterable[OpCall], ops: Sequence[OpCall], reference: Trace, low: FloatFormat) -> Iterator[Finding]:
    """Yield what causes get for each of the ops `made`, which are some of `ops`."""
    yield from (Finding(op=op, ops=ops, low=low, reference=reference) for op in made)


def find_swallowed(trace: Trace, reference: Trace, low: FloatFormat) -> tuple[Finding, ...]:
    """Return the sources that fp32 does not have and that a later op turned into finite values other than fp32's.

    A clamp or a saturating function that is meant to cut them gives the same in both runs, so they do not count.
    """
    made = (op for op in trace.ops if op.analysis and not op.nonfinite_inputs)
    sources = findings_of(made, trace.ops, reference, low)
    return tuple(source for source in sources if not _is_meant(source) and _is_missed(source))


def _is_missed(source: Finding) -> bool:
    """Return True if an op downstream of `source` turned its infinities into finite values that differ from fp32's."""
    reached = [*reached_ops({source.op.order}, source.ops)]
    carriers = {op.order for op in (source.op, *reached)}
    swallowing = [op for op in reached if op.outputs_finite]
    taken = ((op, tensor.stats) for op in swallowing for tensor in op.nonfinite_inputs if tensor.producer in carriers)
    return any(stats is not None and _swallows_wrongly(op, stats, source.reference) for op, stats in taken)


def _swallows_wrongly(op: OpCall, taken: TensorStats, reference: Trace) -> bool:
    if op.key not in reference.by_key:
        return True
    pairs = zip(op.outputs, reference.by_key[op.key].outputs, strict=False)
    return any(
        outputs_differ((_at_infinities(ours, taken),), (_at_infinities(theirs, taken),)) for ours, theirs in pairs
    )


def _at_infinities(made: TensorStats, taken: TensorStats) -> TensorStats:
    """Return an output's statistics, sampled only where an input of the same shape is non-finite."""
    if made.sample is None or taken.sample is None or made.shape != taken.shape:
        return made
    return replace(made, sample=made.sample[~np.isfinite(taken.sample)])


def _absorbing(sources: Sequence[Finding]) -> Iterator[int]:
    """Yield the ops that made of an infinity the very 0 at which a source is singular, as in 1 / (x / inf)."""
    for source in sources:
        edge = singular_edge(source.op) or 0.0
        for tensor in singular_inputs(source.op):
            makers = ancestors(source.ops, tensor, _DEPTH, through=_KEEP_ZERO)
            yield from (op.order for op in makers if _absorbs_at(op, edge))


def _absorbs_at(op: OpCall, value: float) -> bool:
    """Return True if the op has exactly `value` for infinite elements alone, and no infinity in its result."""
    made = op.outputs[0]
    taken = [tensor.stats for tensor in op.nonfinite_inputs if tensor.stats is not None]
    if made.sample is None or not op.outputs_finite or not (made.sample == value).any():
        return False
    spread = [sample for stats in taken if (sample := _spread_like(stats, made)) is not None]
    return any(np.isinf(sample[made.sample == value]).all() for sample in spread)


def _spread_like(taken: TensorStats, made: TensorStats) -> NDArray[np.float32] | None:
    """Return the elements that an op took for each of those sampled of what it made; None if they are not known."""
    if taken.sample is None or made.sample is None:
        return None
    if taken.shape == made.shape:
        return taken.sample
    if len(taken.sample) < taken.numel or len(made.sample) < made.numel:
        return np.full(len(made.sample), taken.sample[0]) if np.isinf(taken.sample).all() else None
    with suppress(ValueError):  # of other shapes, as a sum's
        return np.broadcast_to(taken.sample.reshape(taken.shape), made.shape).reshape(-1)
    return None


def _slice(ops: tuple[OpCall, ...], symptoms: Sequence[int]) -> list[OpCall]:
    """Return the ops that passed non-finite values on to `symptoms`, and these, in the order of execution."""
    seen, waiting = set(), [*symptoms]
    while waiting:
        order = waiting.pop()
        if order not in seen:
            seen.add(order)
            waiting += [tensor.producer for tensor in ops[order].carried_inputs if tensor.producer is not None]
    return [ops[order] for order in sorted(seen)]


def _is_created(source: Finding) -> bool:
    """Return True if the op made unintended values: from finite ones, or by overflowing beside infinities."""
    if not source.had_inf_input:
        return not _is_meant(source)
    return _overflows(source.op) and not (
        source.reference.finite and source.reference_op is not None and _overflows(source.reference_op)
    )


def _overflows(op: OpCall) -> bool:
    return op.analysis is not None and op.analysis.exact is not None


def _is_meant(source: Finding) -> bool:
    """Return True for infinities that the code wrote itself, or at most as many as a finite fp32 run has there."""
    kinds = source.op.analysis.kinds if source.op.analysis else ()
    if "nan" in kinds:
        return False
    if writes_infinity(source.op) or is_log_of_mask(source.op, source.ops):
        return True
    same = source.reference_op
    if not source.reference.finite or same is None or same.outputs_finite:
        return False
    return source.op.analysis is None or same.analysis is None or source.op.analysis.num_bad <= same.analysis.num_bad


def diagnose_outside(
    kind: CausePhase, name: str, stats: TensorStats, trace: Trace | None = None
) -> tuple[Diagnosis, ...]:
    """Diagnose a weight, buffer, input or target that was non-finite from the start; empty if it was not."""
    low, built = (trace.format, name in trace.built) if trace else (None, False)
    cause = find_cause(kind, OutsideTensor(name=name, stats=stats, low=low, built=built))
    if cause is None:
        return ()
    is_state = kind in ("weight", "buffer")
    origin = Origin(
        phase="state" if is_state else "input",
        place=_place_of(name.rpartition(".")[0] if is_state else "", trace),
        op=None,
        source=None,
        elements=nonfinite_elements(stats, None if is_state else trace),
        would_be=None,
        inputs=(),
        output=stats,
    )
    return (Diagnosis(origin=origin, cause=cause),)


def diagnose_optimizer(slots: Sequence[OptimizerSlot], trace: Trace) -> Iterator[Diagnosis]:
    """Yield a diagnosis for each parameter whose next optimizer step divides by zero."""
    for slot in slots:
        cause, counts = find_cause("optimizer", slot), slot.moment.counts
        if cause is not None and counts is not None:
            num_bad = (counts.num_zero, slot.moment.numel)
            origin = in_optimizer("addcdiv", slot.parameter, num_bad, trace)
            yield Diagnosis(origin=replace(origin, inputs=(slot.moment,)), cause=cause)


def in_optimizer(op: str, parameter: str, counts: tuple[int, int], trace: Trace) -> Origin:
    """Return an origin at the optimizer's op; `counts` are a parameter's non-finite values and all its values."""
    num_bad, numel = counts
    return Origin(
        phase="optimizer",
        place=_place_of(parameter.rpartition(".")[0], trace),
        op=op,
        source=None,
        # The kinds are not known: NaN where the gradient is zero, an infinity where only its square is.
        elements=NonfiniteElements(kinds=(), num_bad=num_bad, numel=numel, first_index=None, samples=None),
        would_be=None,
        inputs=(),
        output=None,
    )


def _place_of(module: str, trace: Trace | None) -> Place:
    """Return the place of a module's first call, with its type if there was one."""
    places = (call.place for call in trace.calls) if trace is not None else ()
    return next((place for place in places if place.module == module), Place(module=module, type="", call=0))


_ROUNDING = 2.0**-7
"""A gradient that is passed on may be rounded to bf16 on the way."""

_Samples = tuple[NDArray[np.float32], NDArray[np.float32]]
BackwardOps = Mapping[int | None, Sequence[OpCall]]
"""The ops of the backward pass by the order of their forward op."""


def by_forward(backward: Iterable[OpCall]) -> BackwardOps:
    """Return backward ops by the order of their forward op."""
    found: dict[int | None, list[OpCall]] = {}
    for op in backward:
        found.setdefault(op.forward, []).append(op)
    return found


def find_removal(op: OpCall, ops: Sequence[OpCall], backward: BackwardOps) -> tuple[OpCall | None, bool]:
    """Return the op of the forward that removed the value where the backward `op` turns a zero gradient into NaN.

    The second is True if it selects: it passes on each gradient that it gets as it is, or as 0. What values and
    gradients do decides, not the names of ops.

    An Inf or NaN in the forward was removed by the first op that makes a finite result of it; a finite value by the
    first op whose gradient is 0 there although the one that it got is not. None if the gradient that comes back is not
    0, or becomes 0 in another way, such as the derivative of a square at 0.
    """
    operands = op.analysis.operands if op.analysis is not None else ()
    # The incoming gradient has to be exactly 0 at the worst element; in doubt, anywhere.
    meets_zero = any(it.at_worst == 0 or (it.at_worst is None and it.counts.num_zero) for it in operands)
    if op.forward is None or not meets_zero:
        return None, False
    forward, place = ops[op.forward], _find_place(op)
    is_hidden, carriers = not forward.outputs_finite, {forward.order}
    for later in ops[forward.order + 1 :]:
        taken = [tensor for tensor in later.inputs if tensor.producer in carriers]
        if is_hidden:
            taken = [tensor for tensor in taken if tensor in later.nonfinite_inputs]
        has_own = later.order in backward  # the derivative of x + 1 is no op
        if not taken or (not has_own and (later.outputs_finite or not is_hidden)):
            continue
        if is_hidden and later.outputs_finite:
            return later, _selects(backward.get(later.order, ()))
        if not is_hidden and _zeroes(backward[later.order], place):
            return (later, True) if _selects(backward[later.order]) else (None, False)
        carriers.add(later.order)
    return None, False


def _selects(nodes: Sequence[OpCall]) -> bool:
    """Return True if these backward ops of one op pass on each gradient that they get as it is, or as 0."""
    return any(
        _passes_on(node, given, made) for node in nodes for given, made in _pairs(node) if np.isfinite(made).all()
    )


def _passes_on(node: OpCall, given: NDArray[np.float32], made: NDArray[np.float32]) -> bool:
    kept = made != 0
    if not kept.any():  # a product with 0 gives that too
        return False
    if given.shape == made.shape:
        return bool(np.isclose(made[kept], given[kept], rtol=_ROUNDING, atol=0).all())
    return node.op in MOVES or bool(np.isin(made[kept], given).all())


def _find_place(op: OpCall) -> tuple[int, int] | None:
    """Return a sampled element where `op` makes a zero gradient non-finite, with the number of samples; else None."""
    for given, made in _pairs(op):
        if given.shape == made.shape:
            places = np.flatnonzero(~np.isfinite(made) & (given == 0))
            if len(places):
                return int(places[0]), len(made)
    return None


def _zeroes(nodes: Sequence[OpCall], place: tuple[int, int] | None) -> bool:
    """Return True if backward ops of one op turn a gradient into 0: at the sampled `place` if that can be told."""
    for node in nodes:
        for given, made in _pairs(node):
            if place is not None and len(given) == len(made) == place[1]:
                if given[place[0]] != 0 and made[place[0]] == 0:
                    return True
            elif (made == 0).sum() > (given == 0).sum() and (made != 0).any():
                return True
    return False


def _pairs(node: OpCall) -> Iterator[_Samples]:
    """Yield the sampled incoming and outgoing gradients of a backward op."""
    taken = [tensor.stats.sample for tensor in node.inputs if tensor.stats is not None]
    for given, made in product(taken, [stats.sample for stats in node.outputs]):
        if given is not None and made is not None and len(given) and len(made):
            yield given, made
