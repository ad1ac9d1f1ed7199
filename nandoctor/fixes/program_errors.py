"""Tells an argument that rounding put outside a function's domain from one that the program puts there.

Float64 rounds 5e8 times finer than fp32: of what rounding made so little is left there, of what the program made all.
"""

from __future__ import annotations

from collections.abc import Iterable

from nandoctor.causes.sentences import operand, subject
from nandoctor.changes.setting import UseFormat
from nandoctor.diagnosis.conclusion import Findings
from nandoctor.evidence.formats import FP64
from nandoctor.evidence.trace import OpCall
from nandoctor.fixes.verify import Trials
from nandoctor.ops import DOMAINS
from nandoctor.text import number

_LEAST_LEFT = 1e-3
"""The share of the distance outside that is left in float64 if rounding did not make it; of rounding 2e-9 is."""
_SUMS = {"add": "plus", "sub": "minus"}


def find_program_error(findings: Findings, trials: Trials) -> str | None:
    """Describe by how much an argument is outside its domain if no rounding explains that; None if one may."""
    first = next(iter(findings.conclusion.diagnoses), None)
    if not trials.numerics or first is None or first.cause is None or first.cause.code != "invalid-domain":
        return None
    made = _op_at(first.origin.op, first.origin.source, findings.reference.ops)
    traces = trials.trace(UseFormat(format=FP64)) if made is not None and _outside(made) > 0 else None
    ops = traces[0].ops if traces is not None else ()
    exact = _op_at(first.origin.op, first.origin.source, ops)
    if made is None or exact is None or _outside(exact) <= _LEAST_LEFT * _outside(made):
        return None
    name = DOMAINS[exact.op].argument
    taken = operand(exact, name) or f"the argument of {exact.op}"
    return (
        f"The program is wrong here: {taken} is outside the domain of {subject(exact)} by {_describe_distance(exact)} "
        f"in float64 too, so no rounding made it. {_describe_terms(exact, ops)}A clamp would only hide that."
    )


def _op_at(op: str | None, source: object, ops: Iterable[OpCall]) -> OpCall | None:
    """Return the call at an origin whose argument is furthest outside its domain."""
    found = (call for call in ops if call.phase != "backward" and (call.op, call.source) == (op, source))
    return max(found, key=_outside, default=None)


def _outside(op: OpCall) -> float:
    """Return how far the op's argument is outside its domain, 0 if it is inside or on the edge."""
    return max(_distances(op))


def _distances(op: OpCall) -> tuple[float, float]:
    """Return how far the nearest and the furthest element of the op's argument are outside its domain."""
    domain = DOMAINS.get(op.op)
    taken = op.find_input(domain.argument) if domain is not None else None
    stats = taken.stats if taken is not None else None
    if domain is None or stats is None or stats.min is None or stats.max is None:
        return 0.0, 0.0
    below, above = (domain.low - stats.max, domain.low - stats.min), (stats.min - domain.high, stats.max - domain.high)
    nearest, furthest = max(below, above, key=max)
    return max(nearest, 0.0), max(furthest, 0.0)


def _describe_distance(op: OpCall) -> str:
    nearest, furthest = map(number, _distances(op))
    return furthest if nearest in ("0", furthest) else f"{nearest} to {furthest}"


def _describe_terms(op: OpCall, ops: Iterable[OpCall]) -> str:
    """Describe the sum or difference that the argument is, with the range of each term; "" if it is none."""
    taken = op.find_input(DOMAINS[op.op].argument)
    maker = next((call for call in ops if taken is not None and call.order == taken.producer), None)
    if maker is None or maker.op not in _SUMS:
        return ""
    terms = [_describe_term(maker, name) for name in ("self", "other")]
    return f"It is {f' {_SUMS[maker.op]} '.join(terms)}. "


def _describe_term(op: OpCall, name: str) -> str:
    given = op.find_input(name)
    if given is None or given.stats is None:
        return number(dict(op.scalars).get(name, 0.0))
    low, high = (number(limit) for limit in (given.stats.min, given.stats.max) if limit is not None)
    return f"{operand(op, name) or 'a term'} ({low} to {high})"
