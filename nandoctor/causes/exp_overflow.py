"""exp-overflow: an exponential overflows, at once or in the next operation.

What it is
    exp(x) exceeds 65504 from x = 11.09 on, and fp32's limit from 88.7 on. Autocast runs exp in fp32, where the value
    often still fits; it then overflows in the cast or the multiplication that follows.
How nandoctor tells
    The exact value of an exponential is finite and does not fit; or an op overflows whose largest input is an
    exponential, at most moved or cast in between.
Why it happens
    Nothing bounds the argument: exp(logvar), exp(logit_scale), a hand-written softplus, a power with a large exponent.
Fix
    Clamp the argument (`logvar.clamp(max=10)`, `logit_scale.clamp(max=math.log(100))`), subtract the maximum first, or
    use F.softplus or torch.logaddexp. In a loop, such as Sinkhorn's or a forward algorithm, carry the logarithms and
    use torch.logsumexp.
When it is wrong
    An exponential that is infinite in float64 too (x > 709) is recognised by its argument alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, Finding
from nandoctor.causes.candidates import clamp_candidate, mask_candidates, stable_forms
from nandoctor.causes.sentences import explain_overflow
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import EXPONENTIALS, GROWING_ON_BOTH_SIDES, PRODUCTS
from nandoctor.text import number

TITLE = "An exponential is too large for its format"
PHASES = ("forward",)

_FLOAT64_LIMIT = 709.0
_HIGHEST = (80.0, 20.0, 11.0, 8.0, 5.0)
"""Bounds on x: exp(x) fits fp32 (limit 88), its square does too, exp(x) fits fp16 (11), then with room for a factor."""


def diagnose(finding: Finding) -> Account | None:
    if finding.op.op in EXPONENTIALS and _grows(finding):
        return _explain(finding, finding.op)
    if finding.op.op in PRODUCTS or not finding.overflowed:
        return None
    # By its magnitude at the output's worst element or, if that is not known, anywhere.
    sizes = {it.name: it.absmax or 0.0 if it.at_worst is None else abs(it.at_worst) for it in finding.analysis.operands}
    tensor = finding.op.find_input(max(sizes, key=sizes.__getitem__)) if sizes else None
    sources = () if tensor is None else finding.sources(tensor)
    exponential = next((source for source in sources if source.op in EXPONENTIALS - {"pow", "softplus"}), None)
    return None if exponential is None else _explain(finding, exponential)


def _grows(finding: Finding) -> bool:
    if finding.op.op == "pow":
        return finding.overflowed and finding.op.find_input("exponent") is not None
    operands = finding.analysis.operands[:1]
    argument = next((taken.absmax if finding.op.op in GROWING_ON_BOTH_SIDES else taken.max for taken in operands), None)
    return finding.overflowed or (argument is not None and argument > _FLOAT64_LIMIT)


def _explain(finding: Finding, exponential: OpCall) -> Account:
    argument = exponential.inputs[0].stats if exponential.inputs else None
    two_sided = exponential.op in GROWING_ON_BOTH_SIDES
    largest = (argument.absmax if two_sided else argument.max) if argument else None
    reach = "" if largest is None else f" of {'magnitudes' if two_sided else 'values'} up to {number(largest)}"
    made_by = " of ".join(dict.fromkeys((finding.op.op, exponential.op)))
    evidence = Evidence("argument_max", largest, f"the argument of {exponential.op} reaches {number(largest)}")
    return explain_overflow(finding, f"The {made_by}{reach}", [evidence])


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Fuse the exponential with a logarithm that follows, or mask it first; else clamp the exponent to what fits."""
    ops = [finding.op, *(source for tensor in finding.op.inputs for source in finding.sources(tensor))]
    exponential = next((op for op in ops if op.op in EXPONENTIALS and op.inputs), None)
    yield from stable_forms(finding.op, finding.ops)
    if exponential is None:
        return
    exponent = exponential.inputs[-1].name if exponential.op == "pow" else exponential.inputs[0].name
    yield from mask_candidates(exponential, exponent, finding.ops)
    if exponential.op != "pow":
        both = exponential.op in GROWING_ON_BOTH_SIDES
        yield clamp_candidate(exponential, exponent, [(-high if both else None, high) for high in _HIGHEST])
