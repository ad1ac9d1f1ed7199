"""Leads from non-finite values to diagnoses: what made them, the causes that explain them, the ops to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from nandoctor.causes.base import (
    Candidate,
    CausePhase,
    Finding,
    GradientFinding,
    OutsideTensor,
    UpdateFinding,
    is_constant,
)
from nandoctor.causes.mask_constant_overflow import fitting_constants
from nandoctor.causes.registry import find_cause, suggest_changes
from nandoctor.changes.places import site_of
from nandoctor.diagnosis.origin import (
    NonfiniteTrace,
    by_forward,
    diagnose_optimizer,
    diagnose_outside,
    find_nonfinite_places,
    find_removal,
    find_swallowed,
    in_optimizer,
    nonfinite_elements,
    trace_back,
)
from nandoctor.evidence.dump_summary import OptimizerSlot, OptimizerUpdate
from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.formats import FP32, FloatFormat
from nandoctor.evidence.report import Cause, Diagnosis, FirstNonfinite, Growth, Link, Origin, Verdict
from nandoctor.evidence.trace import OpCall, OpTensor, TensorStats, Trace, UpdateTrace
from nandoctor.ops import CASTS, MOVES, PRODUCTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """The place of an op that may be at fault, and the changes of it that are worth trying."""

    site: OpSite
    suggestions: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """All diagnoses, the likeliest first, and the path from the first one's origin to the symptom.

    `suspects` belong to the diagnoses that blame an op of the forward pass or the loss, in the same order.
    `first_nonfinite` is where a non-finite value first showed. `is_meant` is True if the code itself wrote all of them.
    `in_fp32` is True if the first diagnosis is of the fp32 run, because that fails too.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    chain: tuple[Link, ...] = ()
    first_nonfinite: FirstNonfinite | None = None
    is_meant: bool = False
    in_fp32: bool = False

    def followed_by(self, later: Conclusion) -> Conclusion:
        """Return the conclusion with those diagnoses of a later one, as of the backward pass, that blame other ops."""
        known = [(diagnosis.origin.op, diagnosis.origin.source) for diagnosis in self.diagnoses]
        others = (it for it in later.diagnoses if (it.origin.op, it.origin.source) not in known)
        sites = [suspect.site for suspect in self.suspects]
        suspects = (it for it in later.suspects if it.site not in sites)
        return replace(self, diagnoses=(*self.diagnoses, *others), suspects=(*self.suspects, *suspects))


def suspect(finding: Finding, cause: Cause | None) -> Suspect | None:
    """Return the op that a finding blames, with the changes that `cause` suggests; None if only a backward is known."""
    op = finding.forward if isinstance(finding, GradientFinding) else finding.op
    if op is None:
        return None
    return Suspect(site=site_of(op), suggestions=tuple(suggest_changes(cause, finding)))


def diagnose_op(finding: Finding, cause: Cause | None, trace: Trace) -> tuple[Diagnosis, Suspect | None]:
    """Return the diagnosis of an op that made non-finite values, and the suspect if there is one."""
    return Diagnosis(origin=origin_at(finding, trace), cause=cause), suspect(finding, cause)


def origin_at(finding: Finding, trace: Trace) -> Origin:
    """Return an origin at an op that made non-finite values; that of a derivative is the op that it belongs to."""
    op, analysis = finding.op, finding.analysis
    made = next((stats for stats in op.outputs if not stats.finite), op.outputs[0])
    named = op if op.phase == "backward" or op.forward is None else trace.ops[op.forward]
    return Origin(
        phase=op.phase,
        place=named.place,
        op=named.op,
        source=named.own_line,
        called_from=named.called_from,
        elements=nonfinite_elements(made, trace, analysis.counts),
        would_be=analysis.exact,
        inputs=tuple(tensor.stats for tensor in op.inputs if tensor.stats is not None),
        output=made,
        nth=named.nth,
    )


def origin_taken(op: OpCall, tensor: OpTensor) -> Origin:
    """Return the origin of a value from outside the traced ops, at the op that takes it."""
    assert tensor.stats is not None
    return Origin(
        phase=op.phase,
        place=op.place,
        op=op.op,
        source=op.own_line,
        called_from=op.called_from,
        elements=nonfinite_elements(tensor.stats, None),
        would_be=None,
        inputs=(tensor.stats,),
        output=next(iter(op.outputs), None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A part of the step that could not be checked, as a sentence, and how to check it."""

    text: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The step under autocast and in fp32, and the conclusion.

    `ops` are the traced ops, those of the run with the backward pass if there was one; `inside` those of hand-written
    backwards; `bad_gradients` the parameters' non-finite gradients; `slots` the optimizer's state. `random` is True if
    the step draws random numbers. `gaps` are parts that could not be checked. `exposed` is the step with a
    made-up loss, if its gradients are non-finite with any. `guilty` are the samples to blame, None if unknown, and
    `difference` what sets them apart in the batch.
    """

    trace: Trace
    reference: Trace
    verdict: Verdict
    conclusion: Conclusion
    random: bool = False
    ops: tuple[OpCall, ...] = ()
    inside: tuple[OpCall, ...] = ()
    bad_gradients: tuple[TensorStats, ...] = ()
    slots: tuple[OptimizerSlot, ...] = ()
    notes: tuple[str, ...] = ()
    growth: tuple[Growth, ...] = ()
    gaps: tuple[Gap, ...] = ()
    exposed: Any = None
    guilty: tuple[int, ...] | None = None
    difference: str = ""

    @property
    def sound_in_fp32(self) -> bool:
        """True if the failure is one of precision, also one of large weights that fp32 can compute with and square."""
        is_state = self.verdict == "state" and not self.trace.finite and self.reference.finite
        origins = [diagnosis.origin for diagnosis in self.conclusion.diagnoses]
        blamed = [origin.output for origin in origins if is_state or origin.phase == "state"]
        return (is_state or self.verdict in ("precision", "silent")) and all(
            stats and stats.finite and FP32.holds((stats.absmax or 0.0) ** 2) for stats in blamed
        )


def conclude_update(findings: Findings, update: OptimizerUpdate, traced: UpdateTrace) -> Findings:
    """Diagnose a recorded update that left weights non-finite after a finite step, at the op of `traced` that did."""
    trace, op = findings.trace, f"{update.optimizer}.step" if update.optimizer else "update"
    name = next((name for name in update.parameters if name in traced.spoiled), next(iter(update.parameters)))
    origin = in_optimizer(op, name, update.parameters[name], trace)
    made = None
    if name in traced.spoiled:
        reference = replace(trace, ops=())  # no other run has these ops
        found = trace_back(traced.ops, reference, [traced.spoiled[name]], traced.low)
        made = next((it for _, it, _ in _from_sources(found, replace(trace, ops=traced.ops))), None)
    cause = find_cause("update", UpdateFinding(update=update, made=made.cause if made else None))
    diagnosis = Diagnosis(origin=replace(made.origin, place=origin.place) if made else origin, cause=cause)
    notes = (*findings.notes, *traced.notes)
    return replace(findings, verdict="numerics", conclusion=Conclusion(diagnoses=(diagnosis,)), notes=notes)


def conclude_optimizer(findings: Findings) -> Findings:
    """Diagnose an optimizer that divides by zero, and so makes weights non-finite after a finite step.

    In a file saved after that, the weights are non-finite already.
    """
    diagnoses = tuple(diagnose_optimizer(findings.slots, findings.trace))
    if diagnoses and findings.verdict == "healthy":
        conclusion, is_rounded = Conclusion(diagnoses=diagnoses), all(slot.eps for slot in findings.slots)
        return replace(findings, verdict="precision" if is_rounded else "numerics", conclusion=conclusion)
    first = next(iter(findings.conclusion.diagnoses), None)
    owners = {diagnosis.origin.place.module for diagnosis in diagnoses}
    if findings.verdict == "state" and first is not None and first.origin.place.module in owners:
        conclusion = replace(findings.conclusion, diagnoses=(*diagnoses, *findings.conclusion.diagnoses))
        return replace(findings, conclusion=conclusion)
    return findings


def flagged_rows(findings: Findings) -> tuple[int, ...]:
    """Return the non-finite rows at the origin or the first non-finite place, if they have one for each sample.

    Of these, a mask's may be in every row: those count that are non-finite in the output too, if any is.
    """
    origin, first = findings.conclusion.diagnoses[0].origin, findings.conclusion.first_nonfinite
    failing = findings.reference if findings.conclusion.in_fp32 else findings.trace
    rows = origin.elements.samples if origin.phase != "state" else ()
    rows = rows or (first and nonfinite_elements(first.value, findings.trace).samples) or ()
    return tuple(row for row in rows if row in failing.rows_hit) or rows


def blame(findings: Findings, guilty: tuple[int, ...] | None, difference: str) -> Findings:
    """Return the findings with the samples to blame; if they are not known, no tensor's rows are taken for samples."""
    first, *others = findings.conclusion.diagnoses
    later = others if guilty is not None else [_of_samples(diagnosis, None) for diagnosis in others]
    conclusion = replace(findings.conclusion, diagnoses=(_of_samples(first, guilty), *later))
    return replace(findings, conclusion=conclusion, guilty=guilty, difference=difference)


def _of_samples(diagnosis: Diagnosis, samples: tuple[int, ...] | None) -> Diagnosis:
    """Return the diagnosis with these samples to blame; those of a weight or a buffer are none."""
    origin = diagnosis.origin
    elements = replace(origin.elements, samples=None if origin.phase == "state" else samples)
    return replace(diagnosis, origin=replace(origin, elements=elements))


MASK = "mask-constant-overflow"
_MOST_ASKED = 4
"""More origins than these are those of one layer after another, and each takes a run to ask."""

_Found = tuple[int, Diagnosis, Suspect | None]
"""The order of the op that made or took the value, its diagnosis, and the suspect if there is one."""

FailsWithout = Callable[[Trace, Sequence[OpSite]], bool]
"""Takes a failing run and ops; returns True if the step fails in the same way when what they make is finite."""


def conclude(trace: Trace, reference: Trace, low: FloatFormat, fails_without: FailsWithout | None = None) -> Conclusion:
    """Diagnose a non-finite output or loss; if both are finite, overflows that were swallowed on the way.

    If the step fails in fp32 too, precision is not the story: that failure comes first, and then what `low` adds. An
    origin is left out if the step does not fail by it, as far as `fails_without` tells.
    """
    found = _conclude_run(trace, reference, low, fails_without)
    if reference is trace or trace.finite or reference.finite:
        return found
    in_fp32 = _conclude_run(reference, reference, FP32, fails_without)
    # If `low` fails by a weight, and fp32 only by the size of its values, for which float64 has a number: that weight.
    is_by_size = any(it.origin.would_be is not None for it in in_fp32.diagnoses[:1])
    if not in_fp32.diagnoses or (is_by_size and any(it.origin.phase == "state" for it in found.diagnoses[:1])):
        return found
    return replace(in_fp32, in_fp32=True).followed_by(found)


def _conclude_run(trace: Trace, reference: Trace, low: FloatFormat, fails_without: FailsWithout | None) -> Conclusion:
    """Diagnose one run beside its reference."""
    places = find_nonfinite_places(trace, reference)
    if trace.finite:
        return _conclude_swallowed(trace, reference, places, low)
    symptoms = _symptoms(trace, places)
    if not symptoms:
        return _conclude_untraced(trace, places)
    found = trace_back(trace.ops, reference, symptoms, low)
    if not found.outside and not any(source.op.analysis for source in (*found.sources, *found.written)):
        # It came through a tensor that cannot be inspected: start from every non-finite result that no op took, too.
        found = trace_back(trace.ops, reference, [*trace.handed_out, *symptoms], low)
    return _conclude_traced(found, trace, places, fails_without if not reference.finite else None)


def _symptoms(trace: Trace, places: list[FirstNonfinite]) -> list[int]:
    """Return the ops that made the non-finite output or loss; if the forward raised, the last non-finite value."""
    ends = [*trace.output, *([trace.loss] if trace.loss else [])]
    if trace.raised is not None:
        ends = [place.value for place in places[-1:]]
    if trace.raised is not None and not ends:
        return [op.order for op in trace.ops if not op.outputs_finite][-1:]
    nonfinite = [stats for stats in ends if not stats.finite]
    made = [stats.producer for stats in nonfinite if stats.producer is not None]
    # No op is known to have made a numpy array.
    return [*made, *(trace.handed_out if len(made) < len(nonfinite) else ())]


def _conclude_untraced(trace: Trace, places: list[FirstNonfinite]) -> Conclusion:
    """Diagnose from module calls alone: a non-finite array of the batch, or state of the first non-finite module."""
    if not places:
        return Conclusion()
    first = places[0]
    diagnoses: list[Diagnosis] = []
    if first.where == "batch":
        diagnoses += diagnose_outside("input", first.value.path, first.value, trace)
    for stats in first.state:
        name = ".".join(filter(None, (first.place.module, stats.path)))
        if trace.built.get(name):
            continue
        diagnoses += diagnose_outside("buffer" if name in trace.buffers else "weight", name, stats, trace)
    return Conclusion(diagnoses=tuple(diagnoses), first_nonfinite=first)


def _conclude_swallowed(trace: Trace, reference: Trace, places: list[FirstNonfinite], low: FloatFormat) -> Conclusion:
    findings = find_swallowed(trace, reference, low)
    causes = [(finding, cause) for finding in findings if (cause := find_cause("swallowed", finding))]
    return Conclusion(
        diagnoses=told_once(Diagnosis(origin=origin_at(finding, trace), cause=cause) for finding, cause in causes),
        # Suggest the changes for the overflow itself, as if it had reached the output.
        suspects=tuple(filter(None, (suspect(finding, find_cause("forward", finding)) for finding, _ in causes))),
        first_nonfinite=places[0] if places else None,
    )


def _conclude_traced(
    found_trace: NonfiniteTrace, trace: Trace, places: list[FirstNonfinite], fails_without: FailsWithout | None
) -> Conclusion:
    found = [*_from_outside(found_trace, trace), *_from_sources(found_trace, trace)]
    beside = [*_from_sources(replace(found_trace, sources=found_trace.beside), trace)] if found_trace.beside else []
    harmless = _find_harmless([*found, *beside], trace, fails_without)
    # A mask constant that became -inf is harmless except in fully masked rows: any other diagnosis comes first.
    found = [*sorted(found, key=lambda it: (is_mask(it[1]), it[0])), *beside]
    found = [it for it in found if it[2] is None or it[2].site not in harmless or is_mask(it[1])]
    start = found[0][0] if found else 0
    producers = {op.order for op in found_trace.ops if op.order >= start}
    involved = (place for place in places if place.value.producer in producers)
    way = found_trace.way_from(start) if found else ()
    carriers = (op for op in way[1:] if op.op not in MOVES)
    return Conclusion(
        diagnoses=told_once(diagnosis for _, diagnosis, _ in found),
        suspects=tuple(blamed for _, _, blamed in found if blamed is not None),
        chain=tuple(Link(place=op.place, op=op.op) for op in (*way[:1], *carriers)),
        first_nonfinite=next(involved, places[0] if places else None),
        is_meant=not found and not found_trace.sources,
    )


def is_mask(diagnosis: Diagnosis) -> bool:
    """Return True for the constant of a mask that does not fit its format."""
    return diagnosis.cause is not None and diagnosis.cause.code == MASK


def _find_harmless(found: Sequence[_Found], trace: Trace, fails_without: FailsWithout | None) -> set[OpSite]:
    """Return the ops whose NaN or Inf does not make the run fail: a later op leaves it out, or makes 0 of 5 / Inf.

    An overflow is none of them: it has a number in float64, and the 0 of x / Inf is wrong.
    """
    exact = {blamed.site: it.origin.would_be for _, it, blamed in found if blamed is not None}
    if fails_without is None or not 1 < len(exact) <= _MOST_ASKED:
        return set()
    singular = [site for site in exact if exact[site] is None]
    harmless = {site for site in singular if not fails_without(trace, [other for other in exact if other != site])}
    return harmless if len(harmless) < len(exact) else set()


def told_once(diagnoses: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the first diagnosis of each expression: in a loop it has one for each pass."""
    found: dict[object, Diagnosis] = {}
    for diagnosis in diagnoses:
        origin = diagnosis.origin
        of_line = (origin.place.module, origin.op, origin.source)
        place = of_line if origin.source is not None else (origin.place, origin.op, origin.nth)
        found.setdefault(id(diagnosis) if origin.op is None else place, diagnosis)
    return tuple(found.values())


def _from_outside(found_trace: NonfiniteTrace, trace: Trace) -> Iterator[_Found]:
    """Yield what was non-finite before the traced ops took it, with the order of the first op that did."""
    outside = {tensor.path: (op, tensor) for op, tensor in reversed(found_trace.outside) if tensor.origin != "unknown"}
    for op, tensor in found_trace.outside:
        if tensor.origin == "unknown" and not is_constant(tensor):
            yield op.order, Diagnosis(origin=origin_taken(op, tensor), cause=None), None
    for op, tensor, in_fp32 in found_trace.outsized:
        assert tensor.stats is not None
        cause = find_cause("constant", OutsideTensor(name="", stats=tensor.stats, in_fp32=in_fp32))
        blamed = Suspect(site=site_of(op), suggestions=fitting_constants(op, tensor, in_fp32))
        yield op.order, Diagnosis(origin=origin_taken(op, tensor), cause=cause), blamed
    for op, tensor in outside.values():
        assert tensor.stats is not None
        counts = tensor.stats.counts
        if trace.built.get(tensor.path) and tensor.origin != "batch":
            continue
        # A stored additive mask consists of -inf and zeros.
        if counts is None or counts.kinds != ("-inf",) or tensor.stats.absmax:
            for diagnosis in diagnose_outside(_kind(op, tensor, found_trace), tensor.path, tensor.stats, trace):
                yield op.order, diagnosis, None


def _kind(op: OpCall, tensor: OpTensor, found_trace: NonfiniteTrace) -> CausePhase:
    """Return what the tensor is; a model that computes its own loss passes it the target, at most moved or cast."""
    if tensor.origin != "batch":
        return "weight" if tensor.origin == "weight" else "buffer"
    name, before = tensor.name, op.order
    for taker in found_trace.way_from(op.order) if op.phase == "forward" else ():
        name = next((taken.name for taken in taker.nonfinite_inputs if taken.producer == before), name)
        if taker.op not in MOVES | CASTS:
            return "target" if name == "target" else "input"
        before = taker.order
    return "input" if op.phase == "forward" else "target"


def _from_sources(found_trace: NonfiniteTrace, trace: Trace) -> Iterator[_Found]:
    """Yield what the traced ops made, with the order of each op."""
    # An infinity in the code is intended, unless the loss is computed from it.
    in_loss = trace.fails_in_loss
    if not found_trace.sources and not found_trace.written and not found_trace.outsized:
        yield from _from_constants(found_trace, in_loss=in_loss)
    orders = {source.op.order for source in found_trace.sources}
    sources = found_trace.sources or (found_trace.written if in_loss and not found_trace.outsized else ())
    made_at = [(source, _at_function(source, trace)) for source in sources if source.op.analysis is not None]
    selected = {finding.op.forward for _, finding in made_at}  # told by their derivatives
    for source, finding in made_at:
        is_told = finding.op.order != source.op.order and finding.op.order in orders
        if is_told or source.op.order in selected:
            continue
        absurd = absurd_weights(finding, trace)
        yield from ((source.op.order, diagnosis, None) for diagnosis in absurd)
        if not absurd:
            made = finding if finding.op.forward is None else as_gradient(finding, _selection_of(finding.op, trace))
            cause = find_cause("forward" if made is finding else "backward", made)
            yield source.op.order, *diagnose_op(made, cause, trace)


def _at_function(source: Finding, trace: Trace) -> Finding:
    """Return the source of a derivative, at its function if that made values itself which no selection removed."""
    function = None if source.op.forward is None else trace.ops[source.op.forward]
    if function is None or function.outputs_finite or function.analysis is None or _selection_of(source.op, trace):
        return source
    return replace(source, op=function)


def _selection_of(op: OpCall, trace: Trace) -> OpCall | None:
    """Return the op that selects what the function of this derivative made away, or None."""
    removal, selects = find_removal(op, trace.ops, by_forward(trace.ops))
    return removal if selects else None


def as_gradient(finding: Finding, removal: OpCall | None, excess_scale: float | None = None) -> GradientFinding:
    """Return the finding of an op that computes a derivative: in the backward pass, or in the forward or the loss."""
    forward = finding.op.forward
    return GradientFinding(
        op=finding.op,
        ops=finding.ops,
        low=finding.low,
        reference=finding.reference,
        forward=None if forward is None else finding.ops[forward],
        excess_scale=excess_scale,
        discarded_by=removal,
    )


def _from_constants(found_trace: NonfiniteTrace, *, in_loss: bool) -> Iterator[_Found]:
    """Yield tensors that the code made from numbers; for a loss, at the first op that computes with them.

    In an output, a number or a mask is intended. Any other infinite tensor may have been computed outside torch.
    """
    for op, tensor in found_trace.outside:
        if tensor.stats is None or not is_constant(tensor):
            continue
        if in_loss:
            computing = (later for later in found_trace.way_from(op.order) if later.op not in MOVES | CASTS)
            taker = next(computing, op)
            cause = find_cause("constant", OutsideTensor(name="", stats=tensor.stats))
            yield taker.order, Diagnosis(origin=origin_taken(taker, tensor), cause=cause), None
        elif tensor.stats.shape and tensor.stats.absmax:
            yield op.order, Diagnosis(origin=origin_taken(op, tensor), cause=None), None


def absurd_weights(finding: Finding, trace: Trace) -> list[Diagnosis]:
    """Return diagnoses of weights that are finite but too large for any product with them to fit."""
    found: list[Diagnosis] = []
    for tensor in finding.op.inputs if finding.op.op in PRODUCTS else ():
        if tensor.origin == "weight" and tensor.stats is not None:
            found += diagnose_outside("weight", tensor.path, tensor.stats, trace)
    return found


def broken_outside(found_trace: NonfiniteTrace, trace: Trace, origins: Set[str]) -> list[Diagnosis]:
    """Return diagnoses of tensors of these origins, as weights, that were non-finite before traced ops took them."""
    state = tuple(it for it in found_trace.outside if it[1].origin in origins)
    return [diagnosis for _, diagnosis, _ in _from_outside(replace(found_trace, outside=state), trace)]
