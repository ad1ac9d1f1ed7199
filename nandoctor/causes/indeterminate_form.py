"""indeterminate-form: an operation has no defined value for the infinities that it gets.

What it is
    The code writes infinities, and an op has no value for them: a mask applied by multiplication (0 * -inf), a
    hand-written entropy (0 * log 0), the difference of two infinities. Or no op removes them before they reach a
    product. Or an op accepts infinities and its derivative does not: that of logsumexp subtracts them.
How nandoctor tells
    An op returns NaN although its inputs hold infinities and no NaN, or although it only multiplies by an infinity in
    the code. Or an infinity in the code is not masked away before the next product. Or an op with infinite inputs has
    NaN gradients, in fp32 too; or a hand-written backward returns NaN for finite gradients.
Why it happens
    A mask is applied by arithmetic instead of selection.
Fix
    Select instead of multiplying: `torch.where(mask, x, 0)`, `x.masked_fill(~mask, -inf)`; for p * log p, use
    torch.xlogy. Among logarithms, use torch.logaddexp, or a large finite number such as -1e4 for the logarithm of 0.
When it is wrong
    An infinity that came from an overflow is reported as that overflow: this op only passes it on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from nandoctor.causes.base import (
    Candidate,
    Finding,
    GradientFinding,
    feeds_product,
    gradient_evidence,
    singular_edge,
    writes_infinity,
)
from nandoctor.causes.candidates import clamp_candidate, finite_candidate
from nandoctor.causes.sentences import subject
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.places import ancestors, site_of
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import BACKWARD_HOOK, DIVISIONS, FILLS, PRODUCTS, SUMS
from nandoctor.text import kinds_text, plural

TITLE = "NaN from infinities: inf - inf, 0 * inf or inf / inf"
PHASES = ("forward", "backward")
_STEPS = 8
"""How many ops before this one are searched for those that wrote its infinities."""


def diagnose(finding: Finding) -> Account | None:
    if isinstance(finding, GradientFinding):
        return _explain_function(finding) if finding.forward is None else _explain_derivative(finding, finding.forward)
    written = [value for _, value in finding.op.scalars if not math.isfinite(value)]
    if written and not finding.had_inf_input and feeds_product(finding.op, finding.ops):
        return _explain_written(finding, "reaches a product and makes its sums non-finite")
    if any(map(math.isnan, written)) or (written and (finding.analysis.kinds == ("+inf",) or finding.op.op in FILLS)):
        return _explain_written(finding, "is never removed")
    if "nan" not in finding.analysis.kinds or not (finding.had_inf_input or written):
        return None
    infinite = sum(operand.counts.num_posinf + operand.counts.num_neginf for operand in finding.analysis.operands)
    among = plural(infinite, "infinity", "infinities")
    what_it_does, detail = _form(finding)
    return Account(
        headline=f"{subject(finding.op)} {what_it_does}",
        explanation=f"{finding.op.op} turns infinities into NaN{detail}; this leaves "
        f"{plural(finding.analysis.num_bad, 'element')} without a value.",
        evidence=(Evidence("num_infinite", infinite + len(written), f"{among} among the inputs"),),
    )


def _form(finding: Finding) -> tuple[str, str]:
    """Return the form that op and operands show, as a phrase for the headline and one for the explanation."""
    op, operands = finding.op.op, finding.analysis.operands
    zeros = sum(operand.counts.num_zero for operand in operands)
    if (op in PRODUCTS or op == "mul") and zeros:
        detail = f": it multiplies them by zeros (0 * inf; {plural(zeros, 'zero')} among the inputs)"
        return "multiplies 0 by Inf", detail
    if op in SUMS or op in PRODUCTS:
        return "subtracts Inf from Inf", ": it subtracts them from each other (inf - inf)"
    if op in DIVISIONS:
        return "divides Inf by Inf", ": it divides them by each other (inf / inf)"
    return "turns infinities into NaN", ""


def _explain_written(finding: Finding, what: str) -> Account:
    num_bad = finding.analysis.num_bad
    return Account(
        headline=f"{subject(finding.op)} writes {kinds_text(finding.analysis.kinds)}, which {what}",
        explanation=f"The {kinds_text(finding.analysis.kinds)} that {finding.op.op} writes here {what}.",
        evidence=(Evidence("num_infinite", num_bad, f"it writes {plural(num_bad, 'non-finite value')}"),),
    )


def _explain_function(finding: GradientFinding) -> Account | None:
    """Explain a hand-written backward that makes NaN from finite gradients, or an Inf that fp32 has as well."""
    if finding.reference_is_finite and "nan" not in finding.analysis.kinds:
        return None  # an overflow
    if finding.op.op == BACKWARD_HOOK:
        return None  # it is not known which op of the hook it was
    return Account(
        headline=f"The backward of {finding.op.op} turns finite gradients into non-finite ones",
        explanation=f"The backward of the custom Function {finding.op.op} turns finite gradients into non-finite ones.",
        evidence=gradient_evidence(finding),
    )


def _explain_derivative(finding: GradientFinding, forward: OpCall) -> Account | None:
    """Explain a derivative that is NaN because the forward op's inputs are infinite."""
    infinite = _infinite_inputs(finding)
    if not infinite or finding.reference_is_finite or "nan" not in finding.analysis.kinds:
        return None
    return Account(
        headline=f"{subject(forward)} gets infinities, and its gradient is NaN: inf - inf or 0 * inf",
        explanation=f"{forward.op} has a value for the infinities that it gets, but its derivative has none: it "
        "subtracts them or multiplies them by 0, in fp32 too.",
        evidence=gradient_evidence(finding),
    )


def _infinite_inputs(finding: GradientFinding) -> tuple[OpTensor, ...]:
    """Return the forward op's infinite inputs; none if it makes NaN or gets one, or is at its singular point."""
    forward = finding.forward
    if forward is None or singular_edge(forward) is not None:
        return ()
    counts = [tensor.stats.counts for tensor in forward.inputs if tensor.stats is not None]
    makes_nan = forward.analysis is not None and "nan" in forward.analysis.kinds
    gets_nan = any(found.num_nan for found in counts if found is not None)
    return () if makes_nan or gets_nan else forward.nonfinite_inputs


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Use a finite constant or factor instead of the infinity: 0 times it is 0."""
    if isinstance(finding, GradientFinding):
        for tensor in _infinite_inputs(finding):
            assert finding.forward is not None
            yield finite_candidate(finding.forward, tensor)
        return
    behind = (ancestors(finding.ops, tensor, _STEPS) for tensor in finding.op.nonfinite_inputs)
    writers = {site_of(op): op for op in chain.from_iterable(behind) if writes_infinity(op)}  # as of a mask
    for op in (finding.op, *writers.values()):
        for name, value in op.scalars:
            if math.isinf(value):
                yield tuple(
                    SetArgument(site=site_of(op), argument=name, was=value, value=math.copysign(finite, value))
                    for finite in (1e4, 1e3)
                )
    is_sum = finding.op.op in SUMS  # its second operand is bounded: a mask's -Inf in the first stays what it is
    is_product = finding.op.op in {"mul", *PRODUCTS}
    largest = (1e4,) if is_sum else (1e4, finding.format.max)  # a mask's usual value, then the largest
    for operand in finding.analysis.operands[is_sum:] if is_sum or is_product else ():
        low, high = operand.counts.num_neginf > 0, operand.counts.num_posinf > 0
        if low or high:
            bounds = [(-limit if low else None, limit if high else None) for limit in largest]
            yield clamp_candidate(finding.op, operand.name, bounds)
