"""invalid-domain: a function is asked for a value outside of where it is defined.

In: a `Finding`. Out: a `Cause`, or None.

What it is
    The square root or logarithm of a negative number, a negative number to a fractional power, acos beyond 1.
Evidence it needs
    Finite inputs outside of the domain, and NaN in the output.
Why it happens
    Rounding pushed a value over the edge (a variance as E[x^2] - E[x]^2 of -1e-4, a cosine of 1.0005), or
    nothing bounds it.
Fix
    Clamp to the domain: `x.clamp(min=0).sqrt()`, `cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()`.
Known problems
    None.
"""

from __future__ import annotations

from nandoctor.evidence.report import Cause, Evidence
from nandoctor.rules.base import Finding, number

CODE = "invalid-domain"
TITLE = "A function was evaluated outside its domain"

_DOMAINS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(["sqrt", "rsqrt", "log", "log2", "log10", "pow", "xlogy", "special_xlogy"], (0.0, float("inf"))),
    **dict.fromkeys(("log1p", "special_log1p"), (-1.0, float("inf"))),
    **dict.fromkeys(("acos", "asin", "arccos", "arcsin", "erfinv", "special_erfinv"), (-1.0, 1.0)),
    **dict.fromkeys(("atanh", "arctanh"), (-1.0, 1.0)),
    **dict.fromkeys(("acosh", "arccosh"), (1.0, float("inf"))),
    **dict.fromkeys(("logit", "special_logit"), (0.0, 1.0)),
}


def diagnose(finding: Finding) -> Cause | None:
    """A function with an argument outside of its domain."""
    domain = _DOMAINS.get(finding.op.op)
    if domain is None or "nan" not in finding.exam.kinds or finding.turned or not finding.exam.operands:
        return None
    argument = finding.exam.operands[-1 if "xlogy" in finding.op.op else 0]
    low, high = domain
    outside = argument.min if argument.min is not None and argument.min < low else argument.max
    if outside is None or low <= outside <= high:
        return None
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"{finding.op.op} is defined from {number(low)} to {number(high)}, and its argument reaches "
        f"{number(outside)}.",
        evidence=(
            Evidence(name="argument", value=outside, text=f"the argument reaches {number(outside)}"),
            Evidence(name="num_bad", value=finding.exam.num_bad, text=f"{finding.exam.num_bad} elements are NaN"),
        ),
    )
