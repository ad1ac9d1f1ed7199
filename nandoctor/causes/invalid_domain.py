"""invalid-domain: a function is evaluated where it is not defined.

What it is
    The square root or logarithm of a negative number, a negative number to a fractional power, acos beyond 1; atanh at
    1 or lgamma at 0, where the function is infinite; or any other pole.
How nandoctor tells
    The inputs are finite and outside the domain, and the output is NaN; or they are on its edge, and the output is
    infinite. A function whose domain is not known counts if float64 has no finite value either.
Why it happens
    Rounding pushed a value over the edge (a variance computed as E[x^2] - E[x]^2 is -1e-4, a cosine is 1.001), nothing
    bounds it, or the data has values that mean something else (-999 for a missing one).
Fix
    If rounding put the argument outside, compute it in fp32, or clamp it to inside the domain:
    `x.clamp(min=1e-6).sqrt()`, `cosine.float().clamp(-1 + 1e-6, 1 - 1e-6).acos()` (in fp16, 1 - 1e-6 is 1). At the edge
    itself the value is finite, but the derivative is infinite. For a determinant that may be negative, take the
    logarithm of its absolute value: `torch.linalg.slogdet(matrix)[1]`. If the data or the program is wrong, a clamp
    only hides it: repair or skip such samples, or correct the formula.
When it is wrong
    A value that is outside by much more than rounding explains was most likely wrong before it came here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nandoctor.causes.base import Candidate, Finding, is_whole_power, outside_domain
from nandoctor.causes.candidates import clamp_candidate, mask_candidates, off_zero_candidate, stable_variances
from nandoctor.causes.sentences import argument, operand, subject
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CASTS, DOMAINS, FILLS, MOVES, NEGATIVE_LOGARITHMS, PRODUCTS, REDUCTIONS
from nandoctor.text import number, plural

TITLE = "A function was evaluated outside its domain"
PHASES = ("forward",)

_MARGINS = (1e-12, 1e-6, 1e-4, 5e-4, 1e-3)
"""Distances to keep from an edge where the derivative is infinite; fp16's step below 1 is 4.9e-4."""
_MARGINS_OF_BOTH = (1e-6, 1e-3)
"""Distances to keep from both 0 and 1."""

_NO_FUNCTIONS = REDUCTIONS | MOVES | CASTS | FILLS | PRODUCTS.keys()


def diagnose(finding: Finding) -> Account | None:
    outside = outside_domain(finding)
    return _explain_pole(finding) if outside is None else _explain_domain(finding, outside)


def _explain_domain(finding: Finding, outside: float) -> Account:
    domain, num_bad = DOMAINS[finding.op.op], finding.analysis.num_bad
    argument = "argument" if domain.argument in ("self", "other") else domain.argument
    taken = operand(finding.op, domain.argument) or f"The {argument} of {finding.op.op}"
    passed = domain.low if outside < domain.low else domain.high if outside > domain.high else None
    side = "below" if outside < domain.low else "above"
    reached = number(outside, unlike=passed)
    undefined = "infinite there" if passed is None else f"undefined {side} {number(passed)}"
    in_fp32 = f", because of rounding to {finding.low}: in fp32 it stays inside" if finding.reference_is_finite else ""
    return Account(
        headline=f"{taken} reaches {reached}, and {finding.op.op} is {undefined}",
        explanation=f"{finding.op.op} is defined from {number(domain.low)} to {number(domain.high)}, and its "
        f"{argument} reaches {reached}{in_fp32}.",
        evidence=(
            Evidence("argument", outside, f"the argument reaches {reached}"),
            Evidence("num_bad", num_bad, f"{plural(num_bad, 'non-finite element')} in the result"),
        ),
    )


def _explain_pole(finding: Finding) -> Account | None:
    """Explain any other function that has no finite value for its finite arguments, even in float64, such as a pole."""
    operands, op, num_bad = finding.analysis.operands, finding.op.op, finding.analysis.num_bad
    is_function = op not in _NO_FUNCTIONS and not op.startswith("_")  # some of torch's internal ops compute derivatives
    if not is_function or finding.had_inf_input or finding.overflowed:
        return None
    evidence = Evidence("num_bad", num_bad, plural(num_bad, "non-finite element"))
    if op in NEGATIVE_LOGARITHMS and finding.analysis.kinds == ("nan",):
        why = NEGATIVE_LOGARITHMS[op]
        headline = f"{subject(finding.op)} is NaN: {why}"
        return Account(headline=headline, explanation=f"{op} is NaN: {why}.", evidence=(evidence,))
    where = "for this matrix"
    if not op.startswith("linalg_"):
        taken = [(operand.name, operand.at_worst) for operand in operands if operand.at_worst is not None]
        if not taken or len(taken) < len(operands):
            return None
        values = ", ".join(number(value) for _, value in taken)
        where = f"at {values}"
        if len(taken) > 1:
            where = "where " + " and ".join(f"{argument(finding.op, name)} is {number(v)}" for name, v in taken)
        evidence = Evidence("argument", taken[0][1], f"the argument is {values}")
    return Account(
        headline=f"{subject(finding.op)} has no finite value {where}",
        explanation=f"{op} has no finite value {where}, not even in float64.",
        evidence=(evidence,),
    )


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Compute a variance so that rounding does not make it negative; else put the argument into the domain.

    Where a later mask leaves the result out, that mask says which arguments do not matter.
    """
    op, domain = finding.op, DOMAINS.get(finding.op.op)
    yield from stable_variances(op, finding.ops)
    if domain is not None:
        yield from mask_candidates(op, domain.argument, finding.ops, safe=domain.inside)
    yield clamp_into_domain(op)


def clamp_into_domain(op: OpCall) -> Candidate:
    """Return clamps of the argument to where the function and its derivative are finite; empty for an unknown op."""
    domain = DOMAINS.get(op.op)
    if domain is None:
        return ()
    if is_whole_power(op):
        return off_zero_candidate(op, "self", _MARGINS, signed=True)
    is_smooth = op.op == "pow" and dict(op.scalars).get("exponent", 0.0) >= 1
    nearest = _MARGINS if domain.low == 0 else _MARGINS[1:]  # next to any other edge fp32 loses 1e-12
    margins = (0.0, *nearest) if is_smooth else nearest
    ends = [(domain.low + margin, None if math.isinf(domain.high) else domain.high - margin) for margin in margins]
    taken = op.find_input(domain.argument)
    stats = None if taken is None else taken.stats
    if op.op == "xlogy" and stats is not None and stats.max == 1:  # a density may take x and 1 - x at once
        ends += [(margin, 1 - margin) for margin in _MARGINS_OF_BOTH]
    return clamp_candidate(op, domain.argument, ends)
