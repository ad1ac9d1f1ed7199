"""eps-underflow: the small constant that was to prevent a division by zero is lost.

What it is
    1e-8 is zero in fp16 (the smallest subnormal is 6e-8), and what is added to a larger number is absorbed. The
    denominator, or the argument of a logarithm or a root, is then exactly zero.
How nandoctor tells
    An op that is singular at its inputs in fp16 while the same op of the fp32 run is finite; and, among the ops that
    made the denominator or the argument, one that added or clamped to a small constant which its format rounds to zero,
    and that gave zeros; or one that gave a number so large that it absorbed the constant, and a subtraction after it;
    or a bound, a factor or a term beside one (0.99999, 1 + 1e-5) of which the format makes one.
Why it happens
    The eps was chosen for fp32, and is used where autocast leaves the op in fp16.
Fix
    An eps that fp16 holds (1e-5, or 6.1e-5 for a normal number), or this line in fp32: `x.float()`.
When it is wrong
    The same eps under an op that CUDA autocast runs in fp32 is harmless, and is judged by what the trace saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nandoctor.causes.base import (
    Candidate,
    Finding,
    GradientFinding,
    ancestors,
    constant_argument,
    gradient_evidence,
    singular_inputs,
    site_of,
)
from nandoctor.causes.sentences import argument, at_singularity, owner, subject
from nandoctor.evidence.edits import KeepOp, SetArgument
from nandoctor.evidence.formats import LARGEST_EPS
from nandoctor.evidence.report import Cause, Evidence
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import (
    CASTS,
    CLAMPS,
    DOMAINS,
    FILLS,
    LOGARITHMS,
    MAXIMA,
    MINIMA,
    MOVES,
    SCALINGS,
    SINGULAR_INPUTS,
    SUBTRACTIONS,
    SUMS,
    Domain,
)
from nandoctor.text import constant, number, plural

CODE = "eps-underflow"
TITLE = "A small constant is lost in the lower precision"
PHASES = ("forward", "backward")

_ADDING = SUMS | CLAMPS | MAXIMA | FILLS
_BOUNDING = CLAMPS | MAXIMA | MINIMA
_HANDING_ON = MOVES | CASTS | {"neg"}
_DEPTH = 6
_LARGER = (1e-4, 1e-3, 1e-5, 1e-6, 1e-7)
"""What an eps is raised to: first what fp16 holds as a normal number, then what it holds at all."""


def diagnose(finding: Finding | GradientFinding) -> Cause | None:
    """A singular op, or the derivative of one, that is finite in fp32, with a lost constant behind it."""
    if not finding.reference_is_finite:
        return None
    if isinstance(finding, Finding):
        singular, what, evidence = finding.op, finding.op.op, _zeros(finding)
    elif finding.forward is not None:
        singular, evidence = finding.forward, gradient_evidence(finding)
        what = f"the derivative of {singular.op}"
    else:
        return None
    place, eps = next(_lost_constants(singular, finding.ops), (None, 0.0))
    if place is None:
        return None
    cause = _explain(what, place, eps, evidence)
    return replace(cause, headline=_headline(finding, singular, place, eps))


def _headline(finding: Finding | GradientFinding, singular: OpCall, place: OpCall, eps: float) -> str:
    dtype = place.outputs[0].dtype
    lost = "rounds to 0" if dtype.round(eps) == 0 else f"is lost beside {constant(_beside(place))}"
    if isinstance(finding, GradientFinding):
        return f"{constant(eps)} {lost} in {dtype}, so the derivative of {subject(singular)} is infinite"
    return f"{constant(eps)} {lost} in {dtype}, so {owner(singular)} {at_singularity(singular, finding.analysis.kinds)}"


def _beside(place: OpCall) -> float:
    """The magnitude that absorbed the constant: 1 for a bound just beside it, else the largest that the op gave."""
    return 1.0 if _gaps_beside_one(place) else place.outputs[0].absmax or 1.0


def _explain(what: str, place: OpCall, eps: float, evidence: tuple[Evidence, ...]) -> Cause:
    dtype = place.outputs[0].dtype
    rounded = dtype.round(eps)
    how = "rounds to zero" if rounded == 0 else "is absorbed by the larger value it is added to"
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"{constant(eps)} {how} in {dtype}, so {what} is evaluated at exactly 0; in fp32 it is not.",
        evidence=(
            Evidence(name="eps", value=eps, text=f"the constant is {constant(eps)}, used by {place.op} in {dtype}"),
            Evidence(name="eps_rounded", value=rounded, text=f"it is {number(rounded)} in {dtype}"),
            *evidence,
        ),
        source=place.source,
        remark=f"{constant(eps)} {'is 0' if rounded == 0 else 'is lost'} in {dtype}",
    )


def _lost_constants(singular: OpCall, ops: Mapping[int, OpCall]) -> Iterator[tuple[OpCall, float]]:
    """The ops behind the singular one that used a small constant in a format that lost it, nearest first."""
    if singular.op not in SINGULAR_INPUTS:
        return
    for eps in _small_constants(singular):
        if singular.outputs[0].dtype.round(eps) == 0:
            yield singular, eps
    for tensor in singular_inputs(singular):
        subtracted = set(_subtracted(singular, tensor, ops))
        near = {op.order for op in ancestors(ops, tensor, _DEPTH, through=_HANDING_ON)}
        for op in ancestors(ops, tensor, _DEPTH):
            for eps in _small_constants(op) if op.op in _ADDING else ():
                if _vanishes(op, eps) or (op.order in subtracted and _is_absorbed(op, eps)):
                    yield op, eps
            is_margin = op.op in _BOUNDING or _is_inside(singular, tensor)
            yield from ((op, eps) for eps in _gaps_beside_one(op) if is_margin and op.order in subtracted | near)


def _subtracted(singular: OpCall, tensor: OpTensor, ops: Mapping[int, OpCall]) -> Iterator[int]:
    """The ops whose values are subtracted from others to make `tensor`, or by the singular op itself: log1p(-p)."""
    ends = [tensor] if singular.op in LOGARITHMS and _is_infinite_at_one(DOMAINS[singular.op]) else []
    for op in ancestors(ops, tensor, _DEPTH, through=_HANDING_ON):
        ends += op.inputs if op.op in SUBTRACTIONS else ()
    for end in ends:
        yield from (op.order for op in ancestors(ops, end, _DEPTH, through=_HANDING_ON))


def _is_infinite_at_one(domain: Domain) -> bool:
    """Tell whether the logarithm is infinite at 1 or -1, as log1p and logit are: it subtracts by itself."""
    return 1.0 in (abs(domain.low), abs(domain.high))


def _small_constants(op: OpCall) -> list[float]:
    return [abs(value) for _, value in op.scalars if 0 < abs(value) <= LARGEST_EPS]


def _is_inside(singular: OpCall, tensor: OpTensor) -> bool:
    """Tell whether the argument stays within the domain: one beyond the edge misses more than a margin beside it."""
    domain, stats = DOMAINS.get(singular.op), tensor.stats
    if domain is None or stats is None or stats.min is None or stats.max is None:
        return True
    return domain.low <= stats.min and stats.max <= domain.high


def _gaps_beside_one(op: OpCall) -> list[float]:
    """By how much a bound, a factor or a term was to differ from one, where the op's format makes exactly one of it."""
    made = op.outputs[0]
    is_met = op.op in _BOUNDING and (made.absmax or 0.0) >= 1
    if not is_met and op.op not in SCALINGS | SUMS:
        return []
    gaps = ((abs(1 - abs(value)), abs(value)) for _, value in op.scalars)
    return [gap for gap, value in gaps if 0 < gap <= LARGEST_EPS and made.dtype.round(value) == 1]


def _vanishes(op: OpCall, eps: float) -> bool:
    """Tell whether the constant is zero in the format of the op, and what the op gave has zeros, or both signs."""
    made = op.outputs[0]
    return made.dtype.round(eps) == 0 and made.min is not None and made.max is not None and made.min <= 0 <= made.max


def _is_absorbed(op: OpCall, eps: float) -> bool:
    """Tell whether the op gave numbers next to which the constant is less than half a step: 1 - 1e-5 is 1 in fp16."""
    made = op.outputs[0]
    return eps < made.dtype.eps / 2 and (made.absmax or 0.0) >= 1


def _zeros(finding: Finding) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            name=f"zeros_{operand.name}",
            value=operand.counts.num_zero,
            text=f"{argument(finding.op, operand.name)} is exactly 0 in {plural(operand.counts.num_zero, 'element')}",
        )
        for operand in finding.analysis.operands
        if operand.counts.num_zero
    )


def suggest(finding: Finding | GradientFinding) -> Iterator[Candidate]:
    """A constant that the format holds, and the line that uses it in fp32."""
    singular = finding.op if isinstance(finding, Finding) else finding.forward
    assert singular is not None
    for place, eps in _lost_constants(singular, finding.ops):
        argument = constant_argument(place, eps)
        was = dict(place.scalars).get(argument or "")
        if argument is not None and was is not None:
            low = place.outputs[0].dtype
            kept = [math.copysign(value, was) for value in _LARGER if value > eps and low.round(value)]
            yield tuple(SetArgument(site=site_of(place), argument=argument, was=was, value=value) for value in kept)
        yield (KeepOp(site=replace(site_of(place), op="")),)
