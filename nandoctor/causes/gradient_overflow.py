"""gradient-overflow: a gradient overflows fp16; the forward does not, nor does the same gradient in fp32.

What it is
    The gradient of an fp16 tensor is fp16 too; one past 65504 becomes Inf, and GradScaler skips every step until the
    scale is too small for the other gradients.
How nandoctor tells
    Finite gradients in, non-finite ones out; the same op in fp32 finite; and no lower loss scale that helps.
Why it happens
    A loss that is a sum rather than a mean, a division by something small, a recurrence that multiplies gradients.
Fix
    Run this op in fp32, average the loss, clip inside the recurrence. If the loss carries a scale of its
    own, remove it, or start GradScaler below 1.
When it is wrong
    Where scale 1 helps, loss-scale-overflow says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, GradientFinding, gradient_evidence
from nandoctor.causes.eps_underflow import raise_constants
from nandoctor.causes.sentences import subject
from nandoctor.evidence.edits import SetLossScale
from nandoctor.evidence.report import Account
from nandoctor.ops import DIVISIONS
from nandoctor.text import number

TITLE = "A gradient is too large for its format"
PHASES = ("backward",)


def diagnose(finding: GradientFinding) -> Account | None:
    """A gradient that fp32 holds."""
    if not finding.reference_is_finite:
        return None
    return Account(
        headline=f"The gradient through {subject(finding.op)} is non-finite in {finding.low} and finite in fp32",
        explanation=f"The incoming gradient of {finding.op.op} is finite, and in fp32 the outgoing one is too; "
        f"{finding.low} holds at most {number(finding.low.max)}.",
        evidence=gradient_evidence(finding),
    )


def suggest(finding: GradientFinding) -> Iterator[Candidate]:
    """A larger constant in the divisor of what comes after; a loss scale below 1, which undoes one of the loss."""
    made = finding.forward.order if finding.forward is not None else None
    for op in finding.ops.values():
        if op.op in DIVISIONS and any(tensor.producer == made for tensor in op.inputs):
            yield from raise_constants(op, finding.ops)
    yield tuple(SetLossScale(value=2.0**-halvings) for halvings in (8, 16, 24))
