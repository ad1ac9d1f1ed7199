"""eps-underflow: the small constant that was to prevent a division by zero is lost.

In: a `Finding`. Out: a `Cause`, or None.

What it is
    1e-8 is zero in fp16 (the smallest subnormal is 6e-8), and what is added to a larger number is absorbed. The
    denominator, or the argument of a logarithm or a root, is then exactly zero.
Evidence it needs
    An op that is singular at its inputs in fp16 while the same op of the fp32 run is finite; and, among the ops that
    made the denominator or the argument, one that added or clamped to a small constant which its format rounds to zero,
    and that gave zeros; or one that gave a number so large that it absorbed the constant, and a subtraction after it.
Why it happens
    The eps was chosen for fp32, and is used where autocast leaves the op in fp16.
Fix
    An eps that fp16 holds (1e-5, or 6.1e-5 for a normal number), or this line in fp32: `x.float()`.
Known problems
    The same eps under an op that CUDA autocast runs in fp32 is harmless, and is judged by what the trace saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nandoctor.evidence.fates import LARGEST_EPS
from nandoctor.evidence.report import Cause, Evidence
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.rules.base import (
    CASTS,
    DIVISIONS,
    LOGARITHMS,
    MOVES,
    Finding,
    GradientFinding,
    ancestors,
    gradient_evidence,
    number,
    words,
)

CODE = "eps-underflow"
TITLE = "A small constant was lost in the lower precision"

_ADDING = words("add sub rsub clamp clamp_min maximum max full")
_SUBTRACTIONS = words("sub rsub")
_HANDING_ON = MOVES | CASTS | {"neg"}
_SINGULAR = DIVISIONS | LOGARITHMS | {"sqrt", "pow"}
_DEPTH = 6


def diagnose(finding: Finding) -> Cause | None:
    """A singular op whose fp32 twin is finite, with a lost constant behind it."""
    if finding.op.op not in _SINGULAR or not finding.twin_is_finite:
        return None
    place, eps = next(_lost_constants(finding.op, finding.ops), (None, 0.0))
    return None if place is None else _explain(finding.op.op, place, eps, _zeros(finding))


def diagnose_gradient(finding: GradientFinding) -> Cause | None:
    """The derivative of a singular op, infinite only because the constant that guards it was lost."""
    forward = finding.forward
    if forward is None or forward.op not in _SINGULAR or not finding.twins_are_finite:
        return None
    place, eps = next(_lost_constants(forward, finding.ops), (None, 0.0))
    return (
        None if place is None else _explain(f"the derivative of {forward.op}", place, eps, gradient_evidence(finding))
    )


def _explain(what: str, place: OpCall, eps: float, evidence: tuple[Evidence, ...]) -> Cause:
    dtype = place.outputs[0].dtype
    rounded = dtype.round(eps)
    how = "rounds to zero" if rounded == 0 else "is absorbed by the larger value it is added to"
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"{number(eps)} {how} in {dtype}, so {what} meets an exact zero; in fp32 it does not.",
        evidence=(
            Evidence(name="eps", value=eps, text=f"the constant is {number(eps)}, used by {place.op} in {dtype}"),
            Evidence(name="eps_rounded", value=rounded, text=f"{dtype} makes {number(rounded)} of it"),
            *evidence,
        ),
    )


def _lost_constants(singular: OpCall, ops: Mapping[int, OpCall]) -> Iterator[tuple[OpCall, float]]:
    """The ops behind the singular one that used a small constant in a format that lost it, nearest first."""
    for eps in _small_constants(singular):
        if singular.outputs[0].dtype.round(eps) == 0:
            yield singular, eps
    guarded = singular.inputs[1:] if singular.op in ("div", "addcdiv", "floor_divide") else singular.inputs
    for tensor in guarded:
        subtracted = set(_subtracted(singular, tensor, ops))
        for op in ancestors(ops, tensor, _DEPTH):
            for eps in _small_constants(op) if op.op in _ADDING else ():
                if _vanishes(op, eps) or (op.order in subtracted and _is_absorbed(op, eps)):
                    yield op, eps


def _subtracted(singular: OpCall, tensor: OpTensor, ops: Mapping[int, OpCall]) -> Iterator[int]:
    """The ops whose values are subtracted from others to make `tensor`, or by the singular op itself: log1p(-p)."""
    ends = [tensor] if singular.op in ("log1p", "special_log1p", "logit", "special_logit") else []
    for op in ancestors(ops, tensor, _DEPTH, through=_HANDING_ON):
        ends += op.inputs if op.op in _SUBTRACTIONS else ()
    for end in ends:
        yield from (op.order for op in ancestors(ops, end, _DEPTH, through=_HANDING_ON))


def _small_constants(op: OpCall) -> list[float]:
    return [abs(value) for _, value in op.scalars if 0 < abs(value) <= LARGEST_EPS]


def _vanishes(op: OpCall, eps: float) -> bool:
    """Whether the constant is zero in the format of the op, and the op gave zeros or values on both sides of zero."""
    made = op.outputs[0]
    return made.dtype.round(eps) == 0 and made.min is not None and made.max is not None and made.min <= 0 <= made.max


def _is_absorbed(op: OpCall, eps: float) -> bool:
    """Whether the op gave numbers next to which the constant is less than half a step: 1 - 1e-5 is 1 in fp16."""
    made = op.outputs[0]
    return eps < made.dtype.eps / 2 and (made.absmax or 0.0) >= 1


def _zeros(finding: Finding) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            name=f"zeros_{operand.name}",
            value=operand.census.num_zero,
            text=f"{operand.census.num_zero} elements of {operand.name} are exactly zero",
        )
        for operand in finding.exam.operands
        if operand.census.num_zero
    )
