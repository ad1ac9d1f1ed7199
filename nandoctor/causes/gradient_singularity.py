"""gradient-singularity: the forward is finite, but its derivative is infinite or too large even for fp32.

What it is
    The derivative of sqrt at 0, of acos at 1, of a power below 1 at 0: the value is finite, the gradient is Inf or NaN.
    The derivative of 1 / x at 1e-25 is -1e50, which fp32 cannot hold.
How nandoctor tells
    A backward op gets finite gradients and returns non-finite ones, in fp32 as well; or an argument is exactly at the
    singular point in the lower precision, and next to it in fp32.
Why it happens
    A distance between equal points, a hand-written norm of a zero vector, an angle of exactly zero; or a cosine near 1
    that low precision rounds to 1, without any overflow.
Fix
    Move away from the point: `(squared + eps).sqrt()` with an eps that the format can hold, or
    `cosine.float().clamp(-1 + 1e-6, 1 - 1e-6)` (in fp16, 1 - 1e-6 is 1). Or use torch.linalg.vector_norm, whose
    gradient at zero is 0; that of F.normalize is 1 / eps = 1e12, which fp16 cannot hold.
When it is wrong
    If a `where` hides the value at that point, the report names where-gradient-trap instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, GradientFinding, gradient_evidence, singular_edge
from nandoctor.causes.candidates import guard_candidate, off_edge_candidates, off_zero_candidate
from nandoctor.causes.invalid_domain import clamp_into_domain
from nandoctor.causes.sentences import operand, subject
from nandoctor.changes.places import singular_inputs
from nandoctor.evidence.report import Account
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import DOMAINS, PRODUCTS, WITHOUT_POLES, Domain
from nandoctor.text import constant, kinds_text, number

TITLE = "The derivative is infinite, or too large, at this point"
PHASES = ("backward",)
_OF_TWO = frozenset({"atan2", "hypot"})
"""Ops without a derivative where both arguments are 0; the second may be moved off 0 without changing the value."""


def diagnose(finding: GradientFinding) -> Account | None:
    forward = finding.forward
    if forward is None:
        return None
    edge = singular_edge(forward)
    if finding.reference_is_finite:
        return None if edge is None else _explain_rounding(finding, forward, edge)
    argument = next((tensor.stats for tensor in (*singular_inputs(forward), *forward.inputs) if tensor.stats), None)
    limits = None if argument is None else (argument.min, argument.max)
    reach = "" if limits is None or None in limits else f" (its input goes from {' to '.join(map(number, limits))})"
    is_beside, kinds = _is_beside_singularity(forward), kinds_text(finding.analysis.kinds)
    at_zero = " at 0" if edge == 0 else ""
    headline = f"The derivative of {subject(forward)} is infinite{at_zero}, so its gradient is {kinds}"
    if is_beside:
        headline = f"The gradient of {subject(forward)} is too large even for fp32, so it is {kinds}"
    return Account(
        headline=headline,
        explanation=f"The derivative of {forward.op} is {'too large' if is_beside else 'infinite'} where it was "
        f"evaluated{reach}: the incoming gradient is finite, the outgoing one is not, in fp32 either.",
        evidence=gradient_evidence(finding),
    )


def _is_beside_singularity(forward: OpCall) -> bool:
    """Return True if the op's derivative is infinite nowhere, or every argument is known to stay off such points."""
    if forward.op in WITHOUT_POLES | PRODUCTS.keys():
        return True
    domain = DOMAINS.get(forward.op, Domain(low=0.0, high=0.0))
    limits = [(taken.stats.min, taken.stats.max) for taken in singular_inputs(forward) if taken.stats is not None]
    return bool(limits) and all(
        low is not None and high is not None and not low <= domain.low <= high and not low <= domain.high <= high
        for low, high in limits
    )


def _explain_rounding(finding: GradientFinding, forward: OpCall, edge: float) -> Account:
    return Account(
        headline=f"{finding.low} rounds {operand(forward, 'self') or 'the argument'} to {constant(edge)}, where "
        f"the derivative of {subject(forward)} is infinite",
        explanation=f"Rounding to {finding.low} makes the argument of {forward.op} exactly {constant(edge)}, where its "
        "derivative is infinite; in fp32 it stays beside that point, and the gradient is finite.",
        evidence=gradient_evidence(finding),
    )


def suggest(finding: GradientFinding) -> Iterator[Candidate]:
    if (forward := finding.forward) is None:
        return
    edge = singular_edge(forward)
    # If the forward is infinite too, do not guard with 0: this batch may not select it, but the next one may.
    guards = guard_candidate(forward, edge=edge) if forward.outputs_finite else ()
    taken = forward.inputs
    if len(taken) > 1:
        taken = tuple(it for it in taken if it.stats is not None and 0 in (it.stats.min, it.stats.max))
    if len(forward.outputs) > 1:  # as of a matrix's eigenvectors, which no single element makes singular
        taken = ()
    names = ["other"] if forward.op in _OF_TWO else [it.name for it in taken]
    yield (*clamp_into_domain(forward), *guards) or tuple(
        edit for name in names for edit in off_zero_candidate(forward, name, signed=True)
    )
    yield from off_edge_candidates(forward, finding.ops)
