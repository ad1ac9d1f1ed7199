"""gradient-singularity: the forward is fine, and its derivative is infinite there.

In: a `GradientFinding`. Out: a `Cause`, or None.

What it is
    The derivative of sqrt at 0, of acos at 1, of a power below 1 at 0: the value is finite, the gradient is Inf or NaN.
How nandoctor tells
    A backward op with finite gradients coming in and non-finite ones going out, in fp32 as well.
Why it happens
    A distance between equal points, a norm of a zero vector written by hand, an angle of exactly zero.
Fix
    Move away from the point: `(squared + eps).sqrt()` with an eps that the format holds,
    `cosine.clamp(-1 + 1e-6, 1 - 1e-6)`; torch.linalg.vector_norm and F.normalize take care of zero themselves.
When it is wrong
    None.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, GradientFinding, gradient_evidence
from nandoctor.causes.invalid_domain import clamp_into_domain
from nandoctor.evidence.report import Cause
from nandoctor.text import number

CODE = "gradient-singularity"
TITLE = "The derivative is infinite at this point"
PHASES = ("backward",)


def diagnose(finding: GradientFinding) -> Cause | None:
    """A derivative that no precision can hold."""
    if finding.reference_is_finite or finding.forward is None:
        return None
    forward = finding.forward
    argument = next((tensor.stats for tensor in forward.inputs if tensor.stats is not None), None)
    reach = f" (its input goes from {number(argument.min)} to {number(argument.max)})" if argument else ""
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"The derivative of {forward.op} is infinite where it was evaluated{reach}: the gradient that "
        "comes in is finite, the one that goes out is not, in fp32 either.",
        evidence=gradient_evidence(finding),
    )


def suggest(finding: GradientFinding) -> Iterator[Candidate]:
    """Keep the argument of the forward op off the point where the derivative is infinite."""
    if finding.forward is not None:
        yield clamp_into_domain(finding.forward)
