"""What becomes of a number in a format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nandoctor.evidence.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FloatFormat

SHOWN_FORMATS = (FP16, BF16, FP8_E4M3, FP8_E5M2, FP32)
LARGEST_EPS = 1e-2
"""A constant above this is no eps: it is a weight, a share, a temperature."""

Effect = Literal["zero", "subnormal", "normal", "overflow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedConstant:
    """A number in a format.

    `rounded` is what it becomes, `rel_err` the difference over the number. `effect` tells what is left of it:
    "subnormal" numbers have lost digits, and some kernels flush them to zero. From the magnitude `absorbed_from` on,
    x + value == x for every x of the format: 0 where that is so for all of them, inf where it is for none.
    """

    format: FloatFormat
    value: float
    rounded: float
    rel_err: float
    effect: Effect
    absorbed_from: float


def round_constant(value: float, format: FloatFormat) -> RoundedConstant:  # noqa: A002 - the field's own name
    """The rounded of a finite number other than zero."""
    rounded = format.round(value)
    return RoundedConstant(
        format=format,
        value=value,
        rounded=rounded,
        rel_err=abs(rounded - value) / abs(value),
        effect=_effect(rounded, format, held=format.holds(value)),
        absorbed_from=format.absorbed_from(value),
    )


def _effect(rounded: float, format: FloatFormat, *, held: bool) -> Effect:  # noqa: A002
    if not held:
        return "overflow"
    if rounded == 0:
        return "zero"
    return "subnormal" if abs(rounded) < format.smallest_normal else "normal"
