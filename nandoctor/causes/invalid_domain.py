"""invalid-domain: a function is asked for a value outside of where it is defined.

In: a `Finding`. Out: a `Cause`, or None.

What it is
    The square root or logarithm of a negative number, a negative number to a fractional power, acos beyond 1; atanh at
    1 or lgamma at 0, the edge of whose domain is infinitely high; any pole.
Evidence it needs
    Finite inputs outside of the domain, and NaN in the output; or on its edge, and an infinity there. Of a function
    without an entry here: no finite value in float64 either.
Why it happens
    Rounding pushed a value over the edge (a variance as E[x^2] - E[x]^2 of -1e-4, a cosine of 1.0005), or
    nothing bounds it.
Fix
    Clamp to the domain: `x.clamp(min=0).sqrt()`, `cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()`.
Known problems
    None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nandoctor.causes.base import CASTS, FILLS, MOVES, PRODUCTS, REDUCTIONS, Candidate, Finding, clamp_candidate, number
from nandoctor.evidence.report import Cause, Evidence
from nandoctor.evidence.trace import OpCall, Operand

CODE = "invalid-domain"
TITLE = "A function was evaluated outside its domain"

_DOMAINS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(["sqrt", "rsqrt", "log", "log2", "log10", "pow", "xlogy", "special_xlogy"], (0.0, float("inf"))),
    **dict.fromkeys(("log1p", "special_log1p"), (-1.0, float("inf"))),
    **dict.fromkeys(("acos", "asin", "arccos", "arcsin"), (-1.0, 1.0)),
    **dict.fromkeys(("acosh", "arccosh"), (1.0, float("inf"))),
    **dict.fromkeys(("logit", "special_logit"), (0.0, 1.0)),
    "batch_norm": (0.0, float("inf")),
}
_OPEN_DOMAINS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("atanh", "arctanh", "erfinv", "special_erfinv"), (-1.0, 1.0)),
    **dict.fromkeys(("lgamma", "special_gammaln", "digamma", "special_digamma", "mvlgamma"), (0.0, float("inf"))),
}
"""Functions that are infinite on the edge."""
_MARGINS = (0.0, 1e-12, 1e-6, 1e-4, 1e-3)
"""How far an argument is kept from the edge."""


_NAMES = {"batch_norm": "running_var"}
"""The operand that the domain is about, where it is not the first."""

_NO_FUNCTIONS = PRODUCTS | REDUCTIONS | MOVES | CASTS | FILLS


def diagnose(finding: Finding) -> Cause | None:
    """A function with an argument outside of its domain."""
    op = finding.op.op
    is_open = op in _OPEN_DOMAINS
    domain = _OPEN_DOMAINS.get(op) or _DOMAINS.get(op)
    if domain is None or finding.had_inf_input or not finding.analysis.operands:
        return None
    if "nan" not in finding.analysis.kinds and not is_open:
        return None
    argument = _argument(finding)
    outside = None if argument is None else _outside(argument, domain, is_open=is_open)
    if outside is None:
        return None
    low, high = domain
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"{op} is defined from {number(low)} to {number(high)}, and its {_NAMES.get(op, 'argument')} "
        f"reaches {number(outside)}.",
        evidence=(
            Evidence(name="argument", value=outside, text=f"the argument reaches {number(outside)}"),
            Evidence(
                name="num_bad", value=finding.analysis.num_bad, text=f"{finding.analysis.num_bad} elements are NaN"
            ),
        ),
    )


def diagnose_pole(finding: Finding) -> Cause | None:
    """Any other function that has no finite value for its finite arguments, even in float64: a pole, and the like."""
    operands, op = finding.analysis.operands, finding.op.op
    taken = [operand.at_worst for operand in operands if operand.at_worst is not None]
    if op in _NO_FUNCTIONS or finding.had_inf_input or finding.overflowed or not taken or len(taken) < len(operands):
        return None
    values = ", ".join(map(number, taken))
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"{op} has no finite value at {values}, not even in float64.",
        evidence=(Evidence(name="argument", value=taken[0], text=f"the argument is {values}"),),
    )


def _argument(finding: Finding) -> Operand | None:
    """The operand that the domain is about."""
    if finding.op.op in _NAMES:
        return finding.operand(_NAMES[finding.op.op])
    return finding.analysis.operands[-1 if "xlogy" in finding.op.op else 0]


def _outside(argument: Operand, domain: tuple[float, float], *, is_open: bool) -> float | None:
    """The end of the argument's range that lies outside of the domain, or on the edge of an open one."""
    if argument.min is None or argument.max is None:
        return None
    low, high = domain
    if argument.min < low or (is_open and argument.min == low):
        return argument.min
    return argument.max if argument.max > high or (is_open and argument.max == high) else None


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Clamp the argument into the domain."""
    yield clamp_into_domain(finding.op)


def clamp_into_domain(op: OpCall) -> Candidate:
    """The argument of a function clamped to where it, and its derivative, is finite; empty for an unknown one."""
    domain = _OPEN_DOMAINS.get(op.op) or _DOMAINS.get(op.op)
    if domain is None or not op.inputs:
        return ()
    low, high = domain
    argument = op.inputs[-1 if "xlogy" in op.op else 0].name
    ends = [(low + margin, None if math.isinf(high) else high - margin) for margin in _MARGINS]
    return clamp_candidate(op, argument, ends)
