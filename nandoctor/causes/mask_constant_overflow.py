"""mask-constant-overflow: the constant that should hide masked positions does not fit.

What it is
    -1e9 or torch.finfo(torch.float32).min, meant as "very negative", becomes -inf in fp16; or two masks at finfo.min
    are added, and their sum is past the limit even of fp32. If a row is masked throughout, softmax then gives 0/0.
How nandoctor tells
    A fill or an addition turns a large negative constant into -inf. The constant is a number in the code, a tensor that
    holds only that number and zeros, or such a number times a mask of zeros and ones. Or a tensor made from one number
    (`torch.tensor(-1e9, dtype=scores.dtype)`) is -inf here and finite in the fp32 run.
Why it happens
    The constant was chosen for fp32, or one mask too many is added.
Fix
    Use the limit of the scores' own dtype, once: `scores.masked_fill(mask, torch.finfo(scores.dtype).min)`; pass
    boolean masks to scaled_dot_product_attention; combine masks with logical_or before filling.
When it is wrong
    A -inf that is written as such in the code is intended, and is never reported here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nandoctor.causes.base import Candidate, Finding, OutsideTensor, only_value
from nandoctor.causes.candidates import clamp_candidate
from nandoctor.causes.sentences import subject
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.places import site_of
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import OpCall, OpTensor, TensorStats
from nandoctor.ops import CASTS, CHECKED_FILLS, FILLS, MINIMA, SCALINGS, SUMS
from nandoctor.text import constant, number, plural

TITLE = "A mask constant is too large for its format"
PHASES = ("forward", "constant")

_OPS = FILLS | CASTS | SUMS | SCALINGS | MINIMA | {"scaled_dot_product_attention"}
_VERY_NEGATIVE = -1e4


def diagnose(finding: Finding | OutsideTensor) -> Account | None:
    if isinstance(finding, OutsideTensor):
        return None if finding.in_fp32 is None else _explain_constant(finding.in_fp32, finding.stats)
    if finding.op.op not in _OPS or finding.analysis.kinds not in (("-inf",), ("nan",), ("nan", "-inf")):
        return None
    masking = min(_constants(finding), default=None)
    if masking is None or (finding.format.holds(masking) and not finding.overflowed):
        return None
    low, limit, written = finding.format, number(-finding.format.max), [value for _, value in finding.op.scalars]
    headline = _becomes_infinite(masking, low)
    consequence = f"gives -inf in {low}, whose limit is {limit}; a fully masked row has no finite value left"
    if low.holds(masking):
        passed = f"goes below {limit}, the lowest number of {low}"
        headline = f"{subject(finding.op)} {passed}: its mask value is {constant(masking)}"
    elif finding.op.op in CHECKED_FILLS and any(-math.inf < value < -low.max for value in written):
        # A number in the code is refused; a tensor would be rounded.
        headline = (
            f"The mask value {constant(masking)} does not fit {low}, which stops at {limit}: {finding.op.op} raises"
        )
        error = f"{finding.op.op} raises an error rather than write -inf"
        consequence = f"is below {limit}, the lowest number of {low}, and {error}"
    return Account(
        headline=headline,
        explanation=f"The mask's constant {constant(masking)} {consequence}.",
        evidence=(
            Evidence("constant", masking, f"the mask's constant is {constant(masking)}"),
            Evidence("num_bad", finding.analysis.num_bad, f"{plural(finding.analysis.num_bad, 'element')} became -inf"),
        ),
    )


def _explain_constant(masking: float, stats: TensorStats) -> Account:
    low, limit = stats.dtype, number(-stats.dtype.max)
    return Account(
        headline=_becomes_infinite(masking, low),
        explanation=f"The mask's constant {constant(masking)} is put into a tensor of {low}, whose limit is {limit}: "
        "there it is -inf, so a fully masked row has no finite value left, and 0 times it is NaN.",
        evidence=(Evidence("constant", masking, f"the mask's constant is {constant(masking)}"),),
    )


def _becomes_infinite(masking: float, low: FloatFormat) -> str:
    return f"The mask value {constant(masking)} becomes -Inf in {low}, which stops at {number(-low.max)}"


def _constants(finding: Finding) -> list[float]:
    written = [value for _, value in finding.op.scalars if -math.inf < value <= _VERY_NEGATIVE]
    # A scaling counts only if it scales a mask, with values from 0 to 1.
    masks = [item for item in finding.analysis.operands if item.shape and item.min is not None and item.min >= 0]
    if finding.op.op in SCALINGS and not any((mask.max or 0.0) <= 1 for mask in masks):
        return []
    return [*written, *filter(None, map(_constant_of, finding.op.inputs))]


def _constant_of(tensor: OpTensor) -> float | None:
    """Return the large negative number of a tensor that holds only it and zeros, all its non-zero magnitudes equal."""
    stats = tensor.stats
    if stats is None or stats.min is None or stats.min > _VERY_NEGATIVE or (stats.max or 0.0) > 0:
        return None
    return stats.min if stats.p05 == stats.median == stats.absmax else None


def constant_in_fp32(tensor: OpTensor, reference: OpCall | None) -> float | None:
    """Return the large negative number that an all -inf constant is in the fp32 run's same op, or None."""
    ours = tensor.stats
    if ours is None or ours.counts is None or ours.counts.num_neginf != ours.numel or reference is None:
        return None
    same = reference.find_input(tensor.name)
    value = None if same is None else only_value(same.stats)
    return value if value is not None and value <= _VERY_NEGATIVE else None


def fitting_constants(op: OpCall, tensor: OpTensor, in_fp32: float) -> tuple[Candidate, ...]:
    """Return two changes: replace the constant by a number that every format can hold, or clamp it to that number."""
    written = SetArgument(site=site_of(op), argument=tensor.name, was=in_fp32, value=_VERY_NEGATIVE)
    return (written,), clamp_candidate(op, tensor.name, [(_VERY_NEGATIVE, None)])


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Use the lowest number of the scores' own format, or one that still fits after additions."""
    for name, value in finding.op.scalars:
        if -math.inf < value <= _VERY_NEGATIVE:
            site = site_of(finding.op)
            candidate = (None, _VERY_NEGATIVE) if finding.op.op in FILLS else (_VERY_NEGATIVE,)
            yield tuple(SetArgument(site=site, argument=name, was=value, value=strength) for strength in candidate)
    for tensor in finding.op.inputs:
        if _constant_of(tensor) is not None:
            yield clamp_candidate(finding.op, tensor.name, [(_VERY_NEGATIVE, None)])
