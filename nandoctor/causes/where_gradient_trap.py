"""where-gradient-trap: a branch that `where` hides in the forward still has a gradient.

What it is
    `torch.where(x > 0, x.log(), 0)` never shows log(0), but its backward multiplies the hidden branch's zero gradient
    by an infinite derivative: 0 * inf is NaN.
How nandoctor tells
    A backward op makes NaN of a gradient that is exactly 0, and a later op of the forward discards the value there:
    its own gradient is everywhere the one that it gets, or 0. Whether that is a `where`, an assignment by index, a
    clamp or a product with a mask of zeros and ones does not matter.
Why it happens
    Selecting after the function does not stop the gradient of the values that are not selected.
Fix
    Make the argument safe before the function: `safe = torch.where(x > 0, x, 1.0); torch.where(x > 0, safe.log(), 0)`.
When it is wrong
    If arithmetic makes the value finite, as exp(-inf) does, the cause is that of the infinite value. If a later op
    multiplies the NaN gradient away, the gradients of the parameters are finite: a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, GradientFinding, divisor_candidate, gradient_evidence, guard_candidate
from nandoctor.causes.invalid_domain import clamp_into_domain
from nandoctor.causes.log_space import stable_forms
from nandoctor.causes.sentences import subject
from nandoctor.changes.places import singular_inputs
from nandoctor.evidence.report import Account
from nandoctor.ops import DIVISIONS, LOGARITHMS

TITLE = "NaN gradient through the unselected branch of torch.where"
PHASES = ("backward",)


def diagnose(finding: GradientFinding) -> Account | None:
    """Explain a singular op whose value a later selection discards at the very elements."""
    selection = finding.discarded_by
    if finding.forward is None or selection is None or "nan" not in finding.analysis.kinds:
        return None
    name = "assignment" if selection.op == "index_put" else f"`{selection.op}`"
    return Account(
        headline=f"The gradient of {subject(finding.forward)} is 0 * Inf = NaN: the {name} after it "
        "hides the value, not the gradient",
        explanation=f"{selection.op} discards part of {finding.forward.op}'s result and sends zero gradients back "
        f"there; the derivative of {finding.forward.op} is infinite at these places, and 0 * inf is NaN.",
        evidence=gradient_evidence(finding),
    )


def suggest(finding: GradientFinding) -> Iterator[Candidate]:
    """Rewrite a logarithm without the probability that is 0; keep the argument off the singular point."""
    forward = finding.forward
    assert forward is not None
    yield from stable_forms(forward, finding.ops)
    by_index = forward.op in LOGARITHMS and finding.discarded_by is not None and finding.discarded_by.op == "index"
    if not by_index:  # the next batch's label may select this 0, and 0 for its logarithm would mean no loss
        yield guard_candidate(forward)
    yield clamp_into_domain(forward)
    for tensor in singular_inputs(forward) if forward.op in DIVISIONS else ():
        yield divisor_candidate(forward, tensor, finding.ops, (1e-12, 1e-6, 1e-4))
