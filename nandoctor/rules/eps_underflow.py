"""eps-underflow: the small constant that was to prevent a division by zero is lost.

In: a `Finding`. Out: a `Cause`, or None.

What it is
    1e-8 is zero in fp16 (the smallest subnormal is 6e-8), and what is added to a larger number is absorbed. The
    denominator, or the argument of a logarithm or a root, is then exactly zero.
Evidence it needs
    An op that is singular at its inputs in fp16 while the same op of the fp32 run is finite; and, among the ops that
    made the input, one that added or clamped to a small constant and shows no trace of it.
Why it happens
    The eps was chosen for fp32, and is used where autocast leaves the op in fp16.
Fix
    An eps that fp16 holds (1e-5, or 6.1e-5 for a normal number), or this line in fp32: `x.float()`.
Known problems
    The same eps under an op that CUDA autocast runs in fp32 is harmless, and is judged by what the trace saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nandoctor.evidence.report import Cause, Evidence
from nandoctor.evidence.trace import OpCall
from nandoctor.rules.base import DIVISIONS, LOGARITHMS, Finding, GradientFinding, ancestors, gradient_evidence, number

CODE = "eps-underflow"
TITLE = "A small constant was lost in the lower precision"

_ADDING = frozenset(["add", "sub", "rsub", "clamp", "clamp_min", "maximum", "max", "full"])
_SINGULAR = DIVISIONS | LOGARITHMS | {"sqrt", "pow"}
_LARGEST_EPS = 1e-2
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
    own = [(singular, value) for _, value in singular.scalars]
    for tensor in singular.inputs:
        behind = [op for op in ancestors(ops, tensor, _DEPTH) if op.op in _ADDING]
        own += [(op, value) for op in behind for _, value in op.scalars]
    for op, value in own:
        if 0 < abs(value) <= _LARGEST_EPS and op.outputs and _is_lost(op, abs(value)):
            yield op, abs(value)


def _is_lost(op: OpCall, eps: float) -> bool:
    """Zero in the format of the op, or so small that its output still reaches zero... or one."""
    dtype = op.outputs[0].dtype
    if dtype.round(eps) == 0:
        return True
    return eps < dtype.eps / 2 and any((stats.absmax or 0.0) >= 1 for stats in op.outputs)


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
