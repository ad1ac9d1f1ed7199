"""What is concluded from the traces: diagnoses, the ops to change, and the way from the origin to the symptom.

Also what is known, and what is missing, where the user interrupted the diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nandoctor.causes.base import Candidate, Finding, GradientFinding, site_of
from nandoctor.causes.registry import suggest_changes
from nandoctor.diagnosis.batch_rows import as_samples
from nandoctor.diagnosis.coverage import Gap
from nandoctor.diagnosis.first_nonfinite import NonfinitePlace, count_nonfinite, find_nonfinite_places
from nandoctor.diagnosis.origin import NonfiniteSource
from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.formats import FP32, FloatFormat
from nandoctor.evidence.report import Cause, Diagnosis, Link, NonfiniteElements, Origin
from nandoctor.evidence.trace import (
    INTERRUPTED,
    OpAnalysis,
    OpCall,
    OpTensor,
    OptimizerSlot,
    TensorStats,
    Trace,
    describe_run,
)
from nandoctor.evidence.verdicts import NOTHING_FOUND, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """An op to blame, where it stands in the code, and the changes of it that are worth trying."""

    site: OpSite
    suggestions: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """All diagnoses, the likeliest first, and the way from the first one's origin to the symptom.

    `suspects` are those of the diagnoses that blame an op of the forward pass or the loss, in the same order.
    `first_nonfinite` is where a non-finite value first came to light. `complete` is False where the traced ops did not
    reach the origin.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    chain: tuple[Link, ...] = ()
    first_nonfinite: NonfinitePlace | None = None
    complete: bool = True


def finding_at(source: NonfiniteSource, trace: Trace, reference: Trace, low: FloatFormat) -> Finding:
    """Put together what the causes are shown of an op that made non-finite values."""
    return Finding(
        op=source.op,
        reference_op=source.reference_op,
        had_inf_input=source.had_inf_input,
        ops={op.order: op for op in trace.ops},
        low=low,
        references={op.key: op for op in reference.ops},
    )


def suspect(op: OpCall, finding: Finding | GradientFinding, cause: Cause | None) -> Suspect:
    """Blame an op; what is worth trying follows from the finding that `cause` explains."""
    return Suspect(site=site_of(op), suggestions=tuple(suggest_changes(cause, finding)))


def origin_at(op: OpCall, analysis: OpAnalysis, trace: Trace) -> Origin:
    """Place the origin at an op that made non-finite values."""
    made_by = op.forward if op.phase == "backward" else op.order
    return Origin(
        phase=op.phase,
        place=op.place,
        op=op.op,
        source=op.source,
        elements=NonfiniteElements(
            kinds=analysis.kinds,
            num_bad=analysis.num_bad,
            numel=analysis.numel,
            first_index=analysis.first_index,
            samples=as_samples(trace, analysis.samples, op.outputs[0].shape, made_by),
        ),
        would_be=analysis.exact_at_worst if analysis.num_exact_finite else None,
        inputs=tuple(tensor.stats for tensor in op.inputs if tensor.stats is not None),
        output=op.outputs[0],
        nth=op.nth,
        grid=analysis.grid,
    )


def origin_taken(op: OpCall, tensor: OpTensor) -> Origin:
    """Place the origin of a value from outside the traced ops where `op` takes it."""
    assert tensor.stats is not None
    return Origin(
        phase=op.phase,
        place=op.place,
        op=op.op,
        source=op.source,
        elements=count_nonfinite(tensor.stats, None),
        would_be=None,
        inputs=(tensor.stats,),
        output=next(iter(op.outputs), None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The step under autocast and in fp32, and what is concluded.

    `ops` are the operations seen, those of the backward pass's run where there was one; `bad_gradients` the
    parameters' non-finite gradients; `slots` the state of the optimizer. `random` tells whether the step draws random
    numbers. `gaps` are what could not be looked at.
    """

    trace: Trace
    reference: Trace
    verdict: Verdict
    conclusion: Conclusion
    random: bool = False
    ops: tuple[OpCall, ...] = ()
    bad_gradients: tuple[TensorStats, ...] = ()
    slots: tuple[OptimizerSlot, ...] = ()
    notes: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()


def find_so_far(trace: Trace, reference: Trace | None) -> Findings:
    """The findings of one run, and of an fp32 run that was not finished, or None where it was not begun.

    Where fp32 was not seen to the end no value can be told from an infinity that is meant, and nothing is blamed.
    """
    if reference is None:
        reference = replace(trace, policy="none", format=FP32, calls=(), ops=(), output=(), loss=None)
        reference = replace(reference, raised=INTERRUPTED)
    first = next(iter(find_nonfinite_places(trace, reference)), None)
    missing = "what fp32 gives, the cause, the gradients, fixes"
    if trace.raised == INTERRUPTED:
        missing = f"whether it reproduces your run, {missing}"
    stopped = describe_run(trace.policy, trace.format) if trace.raised == INTERRUPTED else "after the replay"
    notes = [f"Interrupted {stopped}. Not known: {missing}. Run it again to find out."]
    if first is not None:
        notes.append("An infinity that is meant, such as a mask's, cannot be told from a failure without the fp32 run.")
    return Findings(
        trace=trace,
        reference=reference,
        verdict="interrupted",
        conclusion=Conclusion(first_nonfinite=first, complete=False),
        ops=trace.ops,
        notes=tuple(notes),
    )


def without_backward(findings: Findings) -> Findings:
    """The findings of the forward pass, where the backward pass was interrupted: they clear nothing."""
    verdict = "interrupted" if findings.verdict in NOTHING_FOUND else findings.verdict
    note = "Interrupted in the backward pass. Not known: the gradients, fixes. Run it again to find out."
    return replace(findings, verdict=verdict, notes=(*findings.notes, note))
