"""What is known of a step whose diagnosis the user interrupted, and what is missing."""

from __future__ import annotations

from dataclasses import replace

from nandoctor.diagnosis.conclusion import Conclusion, Findings
from nandoctor.diagnosis.first_nonfinite import find_nonfinite_places
from nandoctor.evidence.formats import FP32
from nandoctor.evidence.trace import INTERRUPTED, Trace, describe_run
from nandoctor.evidence.verdicts import NOTHING_FOUND


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
