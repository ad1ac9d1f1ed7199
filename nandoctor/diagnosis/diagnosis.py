"""From a symptom to diagnoses: the origin as the report keeps it, the rule that explains it, the chain between them.

In: the traces of both runs and the first nonfinite_place. Out: a `Conclusion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nandoctor.causes.base import (
    Candidate,
    Finding,
    GradientFinding,
    OutsideTensor,
    Phase,
    is_constant,
    site_of,
)
from nandoctor.causes.registry import find_cause, suggest_changes
from nandoctor.diagnosis.first_nonfinite import NonfinitePlace, count_nonfinite, find_nonfinite_places
from nandoctor.diagnosis.origin import NonfiniteSource, NonfiniteTrace, find_swallowed, trace_back
from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.optimizer import OptimizerSlot
from nandoctor.evidence.report import Cause, Diagnosis, Link, NonfiniteElements, Origin
from nandoctor.evidence.trace import OpAnalysis, OpCall, OpTensor, Place, TensorStats, Trace
from nandoctor.ops import CASTS, MOVES, PRODUCTS
from nandoctor.text import number


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """An op to blame, where it stands in the code, and the changes of it that are worth trying."""

    site: OpSite
    suggestions: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """All diagnoses, the likeliest first, and the way from the first one's origin to the symptom.

    `leads` are those of the diagnoses that blame an op of the forward pass or the loss, in the same order.
    `first_nonfinite`
    is where the damage first came to light. `complete` is False where the traced ops did not reach the origin.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    leads: tuple[Lead, ...] = ()
    chain: tuple[Link, ...] = ()
    first_nonfinite: NonfinitePlace | None = None
    complete: bool = True


def conclude(trace: Trace, reference: Trace, low: FloatFormat) -> Conclusion:
    """What a non-finite output or loss comes from; where both are finite, what was swallowed on the way to them."""
    nonfinite_places = find_nonfinite_places(trace, reference)
    if trace.finite:
        return _conclude_swallowed(trace, reference, nonfinite_places, low)
    symptoms = _symptoms(trace, nonfinite_places)
    if not symptoms:
        return _conclude_untraced(trace, nonfinite_places)
    return _conclude_traced(trace_back(trace.ops, reference, symptoms), trace, nonfinite_places, low)


def _symptoms(trace: Trace, nonfinite_places: list[NonfinitePlace]) -> list[int]:
    """The ops that made the non-finite output or loss; where the forward raised, what was sighted or made last."""
    ends = [*trace.output, *([trace.loss] if trace.loss else [])]
    if trace.raised is not None:
        ends = [nonfinite_place.value for nonfinite_place in nonfinite_places[-1:]]
    if trace.raised is not None and not ends:
        return [op.order for op in trace.ops if not all(stats.finite for stats in op.outputs)][-1:]
    return [stats.producer for stats in ends if not stats.finite and stats.producer is not None]


def _conclude_untraced(trace: Trace, nonfinite_places: list[NonfinitePlace]) -> Conclusion:
    """What module calls alone can tell: an array of the batch or the state of the first module to show it is bad."""
    if not nonfinite_places:
        return Conclusion(complete=False)
    nonfinite_place, diagnoses = nonfinite_places[0], []
    if nonfinite_place.where == "batch":
        diagnoses += _from_outside("batch", nonfinite_place.value.path, nonfinite_place.value, trace, "forward")
    for stats in nonfinite_place.owner.state if nonfinite_place.owner else ():
        assert nonfinite_place.owner is not None
        name = ".".join(filter(None, (nonfinite_place.owner.module, stats.path)))
        diagnoses += _from_outside("buffer" if name in trace.buffers else "weight", name, stats, trace, "forward")
    return Conclusion(diagnoses=tuple(diagnoses), first_nonfinite=nonfinite_place, complete=bool(diagnoses))


def conclude_backward(
    trace: Trace, reference: Trace, low: FloatFormat, *, loss_scale: float, fixed_by_scale: bool
) -> Conclusion:
    """Where gradients stop being finite: the backward ops that make non-finite gradients of finite ones."""
    ops = {op.order: op for op in trace.ops}
    healthy = {op.key for op in reference.backward if all(stats.finite for stats in op.outputs)}
    sick = {op.key for op in reference.backward if not all(stats.finite for stats in op.outputs)}
    diagnoses, leads = [], []
    for op in trace.backward:
        if op.analysis is None:
            continue
        finding = GradientFinding(
            op=op,
            forward=None if op.forward is None else ops[op.forward],
            # A cast to fp32 has no backward in a run that is fp32 throughout.
            reference_is_finite=op.key not in sick and (op.key in healthy or not reference.bad_gradients),
            fixed_by_scale=fixed_by_scale,
            loss_scale=loss_scale,
            ops=ops,
            low=low,
        )
        cause = find_cause("backward", finding)
        diagnoses.append(Diagnosis(origin=_origin(op, op.analysis, trace), cause=cause))
        if finding.forward is not None:
            leads.append(_lead(finding.forward, finding, cause))
    return Conclusion(diagnoses=tuple(diagnoses) or _first_hit(trace), leads=tuple(leads))


def _first_hit(trace: Trace) -> tuple[Diagnosis, ...]:
    """Where no op makes the bad gradient, as when a hook of the user's does: the op that meets it first."""
    hits = ((op, tensor) for op in trace.backward for tensor in op.inputs if tensor.stats and not tensor.stats.finite)
    return tuple(Diagnosis(origin=_taken(op, tensor), cause=None) for op, tensor in hits)[:1]


def _conclude_swallowed(
    trace: Trace, reference: Trace, nonfinite_places: list[NonfinitePlace], low: FloatFormat
) -> Conclusion:
    findings = [_finding(nonfinite_source, trace, low) for nonfinite_source in find_swallowed(trace, reference)]
    causes = [(finding, cause) for finding in findings if (cause := find_cause("swallowed", finding))]
    return Conclusion(
        diagnoses=tuple(
            Diagnosis(origin=_origin(finding.op, finding.analysis, trace), cause=cause) for finding, cause in causes
        ),
        # The changes are those of the overflow itself, as if it had come to light.
        leads=tuple(_lead(finding.op, finding, find_cause("forward", finding)) for finding, _ in causes),
        first_nonfinite=nonfinite_places[0] if nonfinite_places else None,
    )


def _conclude_traced(
    nonfinite_trace: NonfiniteTrace, trace: Trace, nonfinite_places: list[NonfinitePlace], low: FloatFormat
) -> Conclusion:
    found = [*_from_outside_trace(nonfinite_trace, trace), *_from_sources(nonfinite_trace, trace, low)]
    # A mask's constant that became -inf is harmless but for rows that are masked throughout: whatever else is there
    # is to blame before it.
    found.sort(key=lambda item: (_code(item[1]) == _MASK, item[0]))
    start = found[0][0] if found else 0
    involved = (
        s for s in nonfinite_places if s.value.producer in nonfinite_trace.members and (s.value.producer or 0) >= start
    )
    return Conclusion(
        diagnoses=tuple(diagnosis for _, diagnosis, _ in found),
        leads=tuple(lead for _, _, lead in found if lead is not None),
        chain=_chain(nonfinite_trace.way_from(start)) if found else (),
        first_nonfinite=next(involved, nonfinite_places[0] if nonfinite_places else None),
        complete=nonfinite_trace.complete and (bool(found) or not nonfinite_trace.nonfinite_sources),
    )


_Found = tuple[int, Diagnosis, Lead | None]


def _from_outside_trace(nonfinite_trace: NonfiniteTrace, trace: Trace) -> Iterator[_Found]:
    """What was bad before it met the traced ops, with the order of the op that took it first."""
    outside = {
        tensor.path: (op, tensor) for op, tensor in reversed(nonfinite_trace.outside) if tensor.origin != "unknown"
    }
    for op, tensor in nonfinite_trace.outside:
        if tensor.origin == "unknown" and not is_constant(tensor):
            yield op.order, Diagnosis(origin=_taken(op, tensor), cause=None), None
    for op, tensor in outside.values():
        assert tensor.stats is not None
        if not _is_stored_mask(tensor.stats):
            for diagnosis in _from_outside(tensor.origin, tensor.path, tensor.stats, trace, op.phase):
                yield op.order, diagnosis, None


def _from_sources(nonfinite_trace: NonfiniteTrace, trace: Trace, low: FloatFormat) -> Iterator[_Found]:
    """What the traced ops made, with the order of each op."""
    # An infinity that was written down is meant, until it is what the loss is made of.
    in_loss = trace.loss is not None and not trace.loss.finite
    if in_loss and not nonfinite_trace.nonfinite_sources and not nonfinite_trace.written:
        for op, tensor in nonfinite_trace.outside:
            if is_constant(tensor):
                taker = next(
                    (later for later in nonfinite_trace.way_from(op.order) if later.op not in MOVES | CASTS), op
                )
                assert tensor.stats is not None
                cause = find_cause("constant", OutsideTensor(name="", stats=tensor.stats))
                yield taker.order, Diagnosis(origin=_taken(taker, tensor), cause=cause), None
    for nonfinite_source in nonfinite_trace.nonfinite_sources or (nonfinite_trace.written if in_loss else ()):
        if nonfinite_source.op.analysis is not None:
            finding = _finding(nonfinite_source, trace, low)
            absurd = _absurd_weights(finding, trace)
            for diagnosis in absurd:
                yield nonfinite_source.op.order, diagnosis, None
            if not absurd:
                cause = find_cause("forward", finding)
                by_op = Diagnosis(origin=_origin(finding.op, finding.analysis, trace), cause=cause)
                yield nonfinite_source.op.order, by_op, _lead(finding.op, finding, cause)


def _lead(op: OpCall, finding: Finding | GradientFinding, cause: Cause | None) -> Lead:
    return Lead(site=site_of(op), suggestions=tuple(suggest_changes(cause, finding)))


_MASK = "mask-constant-overflow"


def _code(diagnosis: Diagnosis) -> str | None:
    return diagnosis.cause.code if diagnosis.cause else None


def _is_stored_mask(stats: TensorStats) -> bool:
    """An additive mask as it is stored: -inf, and zeros."""
    return stats.counts is not None and stats.counts.kinds == ("-inf",) and not stats.absmax


def _finding(nonfinite_source: NonfiniteSource, trace: Trace, low: FloatFormat) -> Finding:
    ops = {op.order: op for op in trace.ops}
    return Finding(
        op=nonfinite_source.op,
        reference_op=nonfinite_source.reference_op,
        had_inf_input=nonfinite_source.had_inf_input,
        ops=ops,
        low=low,
    )


def _elements(op: OpCall, analysis: OpAnalysis, trace: Trace) -> NonfiniteElements:
    return NonfiniteElements(
        kinds=analysis.kinds,
        num_bad=analysis.num_bad,
        numel=analysis.numel,
        first_index=analysis.first_index,
        samples=trace.as_samples(analysis.samples, op.outputs[0].shape),
    )


def _place_of(module: str, trace: Trace | None) -> Place:
    """A module by its path, as its first call shows it."""
    calls = trace.calls if trace is not None else ()
    return Place(module=module, type=next((call.type for call in calls if call.module == module), ""), call=0)


def _origin(op: OpCall, analysis: OpAnalysis, trace: Trace) -> Origin:
    return Origin(
        phase=op.phase,
        place=op.place,
        op=op.op,
        source=op.source,
        elements=_elements(op, analysis, trace),
        would_be=analysis.exact_at_worst if analysis.num_exact_finite else None,
        inputs=tuple(tensor.stats for tensor in op.inputs if tensor.stats is not None),
        output=op.outputs[0],
        nth=op.nth,
        grid=analysis.grid,
    )


def _taken(op: OpCall, tensor: OpTensor) -> Origin:
    """A value that came from outside the traced ops, where `op` took it."""
    stats = tensor.stats
    assert stats is not None
    return Origin(
        phase=op.phase,
        place=op.place,
        op=op.op,
        source=op.source,
        elements=count_nonfinite(stats, None),
        would_be=None,
        inputs=(stats,),
        output=next(iter(op.outputs), None),
    )


def _absurd_weights(finding: Finding, trace: Trace) -> list[Diagnosis]:
    """A weight that is finite and so large that no product with it can be asked for."""
    found: list[Diagnosis] = []
    for tensor in finding.op.inputs:
        if tensor.origin == "weight" and tensor.stats is not None and finding.op.op in PRODUCTS:
            found += _from_outside("weight", tensor.path, tensor.stats, trace, finding.op.phase)
    return found


def diagnose_state(
    weights: Sequence[tuple[str, TensorStats]], buffers: Sequence[tuple[str, TensorStats]]
) -> tuple[Diagnosis, ...]:
    """What can be said of bad tensors of which nothing but the name is known."""
    named = [("weight", *item) for item in weights] + [("buffer", *item) for item in buffers]
    return tuple(diagnosis for item in named for diagnosis in _from_outside(*item, None, "forward"))


def _from_outside(kind: str, name: str, stats: TensorStats, trace: Trace | None, phase: str) -> list[Diagnosis]:
    """The diagnosis of a weight, a buffer or an array that was bad from the start; none where it was not."""
    in_batch: Phase = "input" if phase == "forward" else "target"
    phases: dict[str, Phase] = {"batch": in_batch, "weight": "weight", "buffer": "buffer"}
    cause = find_cause(phases[kind], OutsideTensor(name=name, stats=stats))
    if cause is None:
        return []
    owner = "" if kind == "batch" else name.rpartition(".")[0]
    origin = Origin(
        phase="input" if kind == "batch" else "state",
        place=_place_of(owner, trace),
        op=None,
        source=None,
        elements=count_nonfinite(stats, trace if kind == "batch" else None),
        would_be=None,
        inputs=(),
        output=stats,
        grid=stats.counts.grid if stats.counts else None,
    )
    return [Diagnosis(origin=origin, cause=cause)]


def diagnose_optimizer(slots: Sequence[OptimizerSlot], trace: Trace) -> tuple[Diagnosis, ...]:
    """What the next step of the optimizer divides by zero; none where it does not."""
    found = ((slot, find_cause("optimizer", slot)) for slot in slots)
    return tuple(Diagnosis(origin=_in_optimizer(slot, trace), cause=cause) for slot, cause in found if cause)


def _in_optimizer(slot: OptimizerSlot, trace: Trace) -> Origin:
    module, counts = slot.parameter.rpartition(".")[0], slot.moment.counts
    assert counts is not None
    return Origin(
        phase="optimizer",
        place=_place_of(module, trace),
        op="addcdiv",
        source=None,
        elements=NonfiniteElements(
            kinds=(),  # NaN where the gradient is zero, an infinity where it only squares to zero
            num_bad=counts.num_zero,
            numel=slot.moment.numel,
            first_index=None,
            samples=None,
        ),
        would_be=None,
        inputs=(slot.moment,),
        output=None,
    )


def _chain(way: tuple[OpCall, ...]) -> tuple[Link, ...]:
    """The way from the first nonfinite_source to the symptom, without the ops that only move values."""
    carriers = tuple(_link(op, "propagated") for op in way[1:] if op.op not in MOVES)
    return (_link(way[0], "created"), *carriers)


def _link(op: OpCall, event: Literal["created", "propagated"]) -> Link:
    went_in = max((tensor.stats.absmax for tensor in op.inputs if tensor.stats and tensor.stats.absmax), default=None)
    text = f"of {number(went_in)}" if event == "created" and went_in is not None else ""
    return Link(place=op.place, op=op.op, event=event, text=text)
