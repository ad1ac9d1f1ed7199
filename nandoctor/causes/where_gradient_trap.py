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

from nandoctor.causes.base import Candidate, GradientFinding, gradient_evidence, singular_edge
from nandoctor.causes.candidates import finite_candidate, guard_candidate, mask_candidates, stable_forms
from nandoctor.causes.invalid_domain import clamp_into_domain
from nandoctor.causes.sentences import subject
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.places import site_of
from nandoctor.evidence.edits import Together
from nandoctor.evidence.report import Account
from nandoctor.ops import LOGARITHMS, SELECTIONS

TITLE = "NaN gradient through the unselected branch of torch.where"
PHASES = ("backward",)


def diagnose(finding: GradientFinding) -> Account | None:
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
    """Rewrite a logarithm without the probability that is 0; keep the argument off the singular point.

    A selection's own condition is used first. A product with 0 may hide the value of another row than the next batch's.
    """
    forward, selection = finding.forward, finding.discarded_by
    assert forward is not None
    assert selection is not None
    yield from stable_forms(forward, finding.ops)
    guards = guard_candidate(forward, edge=singular_edge(forward))
    if selection.op in SELECTIONS and forward.inputs:
        infinite = (*forward.nonfinite_inputs, *forward.inputs)[0].name
        argument, safe = (guards[0].argument, guards[0].safe) if guards else (infinite, 0.0)
        yield from mask_candidates(forward, argument, finding.ops, safe=safe)
    if not (forward.op in LOGARITHMS and selection.op == "index"):
        yield guards  # the next batch's label may select this 0, and 0 for its logarithm would mean no loss
    yield clamp_into_domain(forward)
    for taken in forward.nonfinite_inputs:
        yield finite_candidate(forward, taken)
        yield (ClampArgument(site=site_of(forward), argument=taken.name, nan=True),)
    if from_outside := [
        ClampArgument(site=site_of(op), argument=tensor.name, nan=True)
        for op in finding.ops
        if op.order <= forward.order and not op.outputs_finite
        for tensor in op.nonfinite_inputs
        if tensor.producer is None
    ]:
        yield (Together(edits=tuple(from_outside)),)
