"""gradient-overflow: a gradient overflows fp16, but the forward does not, and the same gradient in fp32 is finite.

What it is
    The gradient of an fp16 tensor is fp16 too, and one past 65504 becomes Inf. GradScaler then skips steps and halves
    the scale until it is too small for the other gradients.
How nandoctor tells
    A backward op turns a finite gradient into a non-finite one; in fp32 the result is finite, and a loss scale of 1
    does not help.
Why it happens
    The loss is a sum rather than a mean, something is divided by a small number, or a recurrence multiplies gradients.
Fix
    Run this op in fp32, average the loss, or clip inside the recurrence. If the loss is multiplied by a scale of its
    own, remove that.
When it is wrong
    If a loss scale of 1 helps, the report names loss-scale-overflow instead.
"""

from __future__ import annotations

from nandoctor.causes.base import GradientFinding, gradient_evidence
from nandoctor.causes.sentences import subject
from nandoctor.evidence.report import Account
from nandoctor.text import number

TITLE = "A gradient is too large for its format"
PHASES = ("backward",)


def diagnose(finding: GradientFinding) -> Account | None:
    if not finding.reference_is_finite:
        return None
    return Account(
        headline=f"The gradient through {subject(finding.op)} is non-finite in {finding.low} and finite in fp32",
        explanation=f"The incoming gradient of {finding.op.op} is finite; the outgoing one is finite in fp32 but not "
        f"in {finding.low}, which holds at most {number(finding.low.max)}.",
        evidence=gradient_evidence(finding),
    )
