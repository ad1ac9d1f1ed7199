"""eps-underflow: the small constant that should keep a value off zero is rounded away.

What it is
    1e-8 rounds to zero in fp16 (the smallest subnormal is 6e-8), and a small number is absorbed when it is added to a
    much larger one. The denominator, or the argument of a logarithm or a root, is then exactly zero.
How nandoctor tells
    An op is singular at its inputs in fp16 and finite in the fp32 run, and an op before it lost a constant: it added,
    or clamped to, a number that its format rounds to zero, and gave zeros; it added the number to one so large that it
    was absorbed, and a subtraction followed; or it used a bound, factor or term near one (0.99999, 1 + 1e-5) that its
    format rounds to one. If fp32 fails as well, fp32 itself rounded the constant to 0 (1e-50) or a bound to 1 (1 -
    1e-8). A constant that was created in the low format, torch.tensor(1e-8, dtype=x.dtype), is read from the fp32 run.
Why it happens
    The eps was chosen for fp32, and autocast leaves the op that uses it in fp16. Or it was chosen for float64, such as
    1 - 1e-8.
Fix
    Use an eps that fp16 can hold (1e-5, or 6.1e-5 for a normal number), or compute this line in fp32: `x.float()`. Next
    to 1, fp32 keeps a difference of 1e-7.
When it is wrong
    The same eps is harmless in an op that CUDA autocast runs in fp32; what counts is the format seen in the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nandoctor.causes import division_by_zero, gradient_singularity, invalid_domain, log_of_zero
from nandoctor.causes.base import Candidate, Finding, GradientFinding, gradient_evidence, is_written, only_value
from nandoctor.causes.sentences import argument, at_singularity, subject
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.keep_fp32 import KeepOp
from nandoctor.changes.places import ancestors, singular_inputs, site_of
from nandoctor.evidence.formats import FP32, LARGEST_EPS, FloatFormat
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import LOSS, OpCall, OpTensor
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
)
from nandoctor.text import constant, number, plural

TITLE = "A small constant is lost in the lower precision"
PHASES = ("forward", "backward")

_ADDING = SUMS | CLAMPS | MAXIMA | FILLS
_BOUNDING = CLAMPS | MAXIMA | MINIMA
_PASSING_ON = MOVES | CASTS | {"neg"}
_DEPTH = 6
_WITHOUT_CONSTANTS: tuple[Any, ...] = (log_of_zero, division_by_zero, invalid_domain, gradient_singularity)
_LARGER = (1e-4, 1e-3, 1e-5, 1e-6, 1e-7)
"""Values that an eps is raised to: first those that are normal numbers in fp16, then others that it can hold."""


def diagnose(finding: Finding) -> Account | None:
    singular = finding.forward if isinstance(finding, GradientFinding) else finding.op
    lost = None if singular is None else next(_lost_constants(singular, finding), None)
    if singular is None or lost is None:
        return None
    place, eps, dtype, larger = lost
    rounded = dtype.round(eps)
    if isinstance(finding, GradientFinding):
        what, then = f"the derivative of {singular.op}", f"the derivative of {subject(singular)} is infinite"
        evidence = gradient_evidence(finding)
    else:
        caller = "the loss" if singular.place.module == LOSS else singular.place.type or "the model"
        what, then = singular.op, f"{caller} {at_singularity(singular, finding.analysis.kinds)}"
        evidence = _zeros(finding)
    how = "rounds to zero" if rounded == 0 else "is absorbed by the larger value it is added to"
    is_lost = "rounds to 0" if rounded == 0 else f"is lost beside {constant(larger)}"
    point = "where it is infinite" if _ends_at_one(singular) else "at exactly 0"
    otherwise = "; in fp32 it is not" if finding.reference_is_finite else ""
    return Account(
        headline=f"{constant(eps)} {is_lost} in {dtype}, so {then}",
        explanation=f"{constant(eps)} {how} in {dtype}, so {what} is evaluated {point}{otherwise}.",
        evidence=(
            Evidence("eps", eps, f"the constant is {constant(eps)}, used by {place.op} in {dtype}"),
            Evidence("eps_rounded", rounded, f"it is {number(rounded)} in {dtype}"),
            *evidence,
        ),
        source=place.source,
        remark=f"{constant(eps)} {'is 0' if rounded == 0 else 'is lost'} in {dtype}",
    )


class _Lost(NamedTuple):
    """A constant, the op that used it, the format that lost it, and the larger number that it was lost beside."""

    place: OpCall
    eps: float
    dtype: FloatFormat
    larger: float


def _lost_constants(singular: OpCall, finding: Finding) -> Iterator[_Lost]:
    """Yield the small constants before the singular op that their format lost, nearest first."""
    if singular.op not in SINGULAR_INPUTS:
        return
    ops, fails_in_fp32 = finding.ops, not finding.reference_is_finite
    if not fails_in_fp32:
        yield from (lost for lost in _small_constants(singular, finding) if lost.dtype.round(lost.eps) == 0)
    for tensor in singular_inputs(singular):
        subtracted = set(_subtracted(singular, tensor, ops))
        near = {op.order for op in ancestors(ops, tensor, _DEPTH, through=_PASSING_ON)}
        for op in ancestors(ops, tensor, _DEPTH):
            small = _small_constants(op, finding) if op.op in _ADDING else ()
            is_absorbing = op.order in subtracted and not fails_in_fp32
            found = [lost for lost in small if _vanishes(lost) or (is_absorbing and _is_absorbed(lost))]
            if fails_in_fp32:
                is_margin = op.op in _BOUNDING and (op.order in subtracted or _ends_at_one(singular))
            else:
                is_margin = (op.op in _BOUNDING or _is_inside(singular, tensor)) and op.order in subtracted | near
            found += _gaps_beside_one(op, finding) if is_margin else []
            yield from (lost for lost in found if lost.dtype == FP32 or not fails_in_fp32)


def _subtracted(singular: OpCall, tensor: OpTensor, ops: Sequence[OpCall]) -> Iterator[int]:
    """Yield the ops whose values were subtracted to make `tensor`, or are by the singular op itself: log1p(-p)."""
    # Logarithms that are infinite at 1 or -1, such as log1p and logit, subtract by themselves.
    ends = [tensor] if singular.op in LOGARITHMS and _ends_at_one(singular) else []
    for op in ancestors(ops, tensor, _DEPTH, through=_PASSING_ON):
        ends += op.inputs if op.op in SUBTRACTIONS else ()
    for end in ends:
        yield from (op.order for op in ancestors(ops, end, _DEPTH, through=_PASSING_ON))


def _ends_at_one(op: OpCall) -> bool:
    """Return True if the op's domain ends at 1 or -1, as that of acos or log1p does."""
    domain = DOMAINS.get(op.op)
    return domain is not None and 1 in (abs(domain.low), abs(domain.high))


def _small_constants(op: OpCall, finding: Finding) -> Iterator[_Lost]:
    for value, dtype in _constants(op, finding):
        if 0 < abs(value) <= LARGEST_EPS:
            yield _Lost(op, abs(value), dtype, op.outputs[0].absmax or 1.0)


def _constants(op: OpCall, finding: Finding) -> Iterator[tuple[float, FloatFormat]]:
    """Yield the constants among the arguments, each with its format; a tensor's constant as it is in the fp32 run."""
    reference = finding.reference.by_key.get(op.key)
    in_fp32 = {tensor.name: tensor.stats for tensor in reference.inputs} if reference is not None else {}
    for tensor in op.inputs:
        value, used = only_value(in_fp32.get(tensor.name)), only_value(tensor.stats)
        if value is None or used in (None, value) or not is_written(op, tensor.name, finding.ops):
            continue
        if tensor.stats is not None and tensor.stats.dtype.round(value) == used:
            yield float(f"{value:.7g}"), tensor.stats.dtype  # fp32 has seven digits
    yield from ((value, op.outputs[0].dtype) for _, value in op.scalars)


def _is_inside(singular: OpCall, tensor: OpTensor) -> bool:
    """Return True if the argument stays within the domain: one beyond the edge lacks more than a margin next to it."""
    domain, stats = DOMAINS.get(singular.op), tensor.stats
    if domain is None or stats is None or stats.min is None or stats.max is None:
        return True
    return domain.low <= stats.min and stats.max <= domain.high


def _gaps_beside_one(op: OpCall, finding: Finding) -> list[_Lost]:
    """Return the intended differences from one of bounds, factors and terms that their format rounds to exactly one."""
    is_met = op.op in _BOUNDING and (op.outputs[0].absmax or 0.0) >= 1
    if not is_met and op.op not in SCALINGS | SUMS:
        return []
    constants = [(abs(value), dtype) for value, dtype in _constants(op, finding)]
    return [
        _Lost(op, float(f"{abs(1 - value):.6g}"), dtype, 1.0)  # 1 - (1 - 1e-8) has noise in float64
        for value, dtype in constants
        if 0 < abs(1 - value) <= LARGEST_EPS and dtype.round(value) == 1
    ]


def _vanishes(lost: _Lost) -> bool:
    """Return True if the constant is zero in its format, and the op's result has zeros or both signs."""
    made = lost.place.outputs[0].known_values
    return lost.dtype.round(lost.eps) == 0 and bool(len(made)) and made.min() <= 0 <= made.max()


def _is_absorbed(lost: _Lost) -> bool:
    """Return True if the constant is less than half a step next to the op's result: 1 - 1e-5 is 1 in fp16."""
    made = lost.place.outputs[0]
    return lost.eps < made.dtype.eps / 2 and (made.absmax or 0.0) >= 1


def _zeros(finding: Finding) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            f"zeros_{operand.name}",
            operand.counts.num_zero,
            f"{argument(finding.op, operand.name)} is exactly 0 in {plural(operand.counts.num_zero, 'element')}",
        )
        for operand in finding.analysis.operands
        if operand.counts.num_zero
    )


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Raise the constant to one that the format can hold, and keep the line that uses it in fp32."""
    singular = finding.forward if isinstance(finding, GradientFinding) else finding.op
    assert singular is not None
    if not finding.reference_is_finite:
        phase = "backward" if isinstance(finding, GradientFinding) else "forward"
        causes = (cause for cause in _WITHOUT_CONSTANTS if phase in cause.PHASES and cause.diagnose(finding))
        yield from next((cause.suggest(finding) for cause in causes), ())
        return
    for place, eps, low, _ in _lost_constants(singular, finding):
        # The argument with this number, or with its negative.
        found = [scalar for scalar in place.scalars if abs(scalar[1]) == abs(eps)]
        for name, was in found[:1]:
            kept = [math.copysign(value, was) for value in _LARGER if value > eps and low.round(value)]
            yield tuple(SetArgument(site=site_of(place), argument=name, was=was, value=value) for value in kept)
        yield (KeepOp(site=replace(site_of(place), op="")),)
