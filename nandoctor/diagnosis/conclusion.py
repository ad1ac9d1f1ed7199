"""What is concluded from the traces: diagnoses, the ops to change, and the way from the origin to the symptom."""

from __future__ import annotations

from dataclasses import dataclass

from nandoctor.causes.base import Candidate, Finding, GradientFinding, site_of
from nandoctor.causes.registry import suggest_changes
from nandoctor.diagnosis.coverage import Gap
from nandoctor.diagnosis.first_nonfinite import NonfinitePlace, count_nonfinite
from nandoctor.diagnosis.origin import NonfiniteSource
from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import Cause, Diagnosis, Link, NonfiniteElements, Origin
from nandoctor.evidence.trace import OpAnalysis, OpCall, OpTensor, OptimizerSlot, TensorStats, Trace
from nandoctor.evidence.verdicts import Verdict


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


def finding_at(source: NonfiniteSource, trace: Trace, low: FloatFormat) -> Finding:
    """Put together what the causes are shown of an op that made non-finite values."""
    return Finding(
        op=source.op,
        reference_op=source.reference_op,
        had_inf_input=source.had_inf_input,
        ops={op.order: op for op in trace.ops},
        low=low,
    )


def suspect(op: OpCall, finding: Finding | GradientFinding, cause: Cause | None) -> Suspect:
    """Blame an op; what is worth trying follows from the finding that `cause` explains."""
    return Suspect(site=site_of(op), suggestions=tuple(suggest_changes(cause, finding)))


def origin_at(op: OpCall, analysis: OpAnalysis, trace: Trace) -> Origin:
    """Place the origin at an op that made non-finite values."""
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
            samples=trace.as_samples(analysis.samples, op.outputs[0].shape),
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
