"""where-gradient-trap: a branch that `where` hides in the forward still has a gradient.

What it is
    `torch.where(x > 0, x.log(), 0)` never shows log(0), but its backward multiplies the hidden branch's zero gradient
    by an infinite derivative: 0 * inf is NaN.
How nandoctor tells
    A backward op makes NaN out of zeros, and its forward result goes into a `where`, `masked_fill`, `nan_to_num`,
    clamp, boolean index or mask.
Why it happens
    Selecting after the function does not stop the gradient of the values that are not selected.
Fix
    Make the argument safe before the function: `safe = torch.where(x > 0, x, 1.0); torch.where(x > 0, safe.log(), 0)`.
When it is wrong
    If a later op multiplies the NaN gradient away, the gradients of the parameters are finite: a note then says so, and
    no cause is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nandoctor.causes.base import (
    Candidate,
    GradientFinding,
    descendants,
    divisor_candidate,
    gradient_evidence,
    guard_candidate,
    singular_inputs,
)
from nandoctor.causes.invalid_domain import clamp_into_domain
from nandoctor.causes.log_space import stable_forms
from nandoctor.causes.sentences import subject
from nandoctor.evidence.report import Account
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CASTS, DIVISIONS, LIMITS, LOGARITHMS, MOVES, SCALINGS, SELECTIONS, SUMS

TITLE = "NaN gradient through the unselected branch of torch.where"
PHASES = ("backward",)

_DEPTH = 4
_KEEPS_PLACE = MOVES | CASTS | SUMS | SCALINGS | {"neg"}


def diagnose(finding: GradientFinding) -> Account | None:
    """Explain a singular op whose forward value a selection hides."""
    meets_zeros = any(operand.counts.num_zero for operand in finding.analysis.operands)
    if finding.forward is None or "nan" not in finding.analysis.kinds or not meets_zeros:
        return None
    selection = _hiding_selection(finding.ops, finding.forward.order)
    if selection is None:
        return None
    return Account(
        headline=f"The gradient of {subject(finding.forward)} is 0 * Inf = NaN: the `{selection}` after it "
        "hides the value, not the gradient",
        explanation=f"{selection} discards part of {finding.forward.op}'s result and sends zero gradients back there; "
        f"the derivative of {finding.forward.op} is infinite at these places, and 0 * inf is NaN.",
        evidence=gradient_evidence(finding),
    )


def _hiding_selection(ops: Mapping[int, OpCall], made: int) -> str | None:
    """Return the op that selects from the result of `made`, or None.

    A mask may come after ops that keep elements in place. A limit must act on the value itself: after arithmetic it may
    keep the singular point, as relu(1 - sqrt(x)) keeps x = 0.
    """
    for op in descendants(ops, made, _DEPTH, through=_KEEPS_PLACE):
        scalars = dict(op.scalars)
        # A product with an integer or boolean mask zeroes gradients as a selection does.
        is_masking = op.op == "mul" and any(taken.stats is None and taken.name not in scalars for taken in op.inputs)
        if op.op in SELECTIONS or is_masking:
            return op.op
    return next((op.op for op in descendants(ops, made, _DEPTH, through=MOVES | CASTS) if op.op in LIMITS), None)


def suggest(finding: GradientFinding) -> Iterator[Candidate]:
    """Rewrite a logarithm without the probability that is 0; keep the argument off the singular point."""
    forward = finding.forward
    assert forward is not None
    yield from stable_forms(forward, finding.ops)
    by_index = forward.op in LOGARITHMS and _hiding_selection(finding.ops, forward.order) == "index"
    if not by_index:  # the next batch's label may select this 0, and 0 for its logarithm would mean no loss
        yield guard_candidate(forward)
    yield clamp_into_domain(forward)
    for tensor in singular_inputs(forward) if forward.op in DIVISIONS else ():
        yield divisor_candidate(forward, tensor, finding.ops, (1e-12, 1e-6, 1e-4))
