"""Floating-point formats, what they can hold, and how numbers round in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """A binary floating-point format: `1 + fraction_bits` bits of significand, exponents `min_exponent..max_exponent`.

    `has_inf` is False for formats that overflow to NaN (fp8 e4m3fn), which use the top mantissa code for NaN.
    """

    name: str
    label: str
    fraction_bits: int
    min_exponent: int
    max_exponent: int
    has_inf: bool = True

    def __str__(self) -> str:
        return self.label

    @property
    def max(self) -> float:
        """Largest finite value."""
        lost = self.eps if self.has_inf else 2 * self.eps
        return (2.0 - lost) * 2.0**self.max_exponent

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.fraction_bits

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with the full significand."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (self.min_exponent - self.fraction_bits)

    @property
    def flush_threshold(self) -> float:
        """Largest magnitude that rounds to zero: the tie, since zero is its even neighbour."""
        return self.smallest_subnormal / 2

    def holds(self, magnitude: float) -> bool:
        """Return True if a value of this magnitude stays finite when rounded to the format."""
        return math.isfinite(self.round(magnitude))

    def headroom_bits(self, magnitude: float) -> float:
        """Return log2(max / magnitude), the doublings left before overflow; negative past it, inf for zero."""
        if magnitude == 0:
            return math.inf
        return math.log2(self.max) - math.log2(abs(magnitude))

    def round(self, value: float) -> float:
        """Round to nearest, ties to even, with subnormals; overflow gives inf, or nan if the format has no inf."""
        if math.isnan(value) or value == 0:
            return value
        rounded = abs(value)
        if math.isfinite(value):
            exponent = max(math.frexp(value)[1] - 1, self.min_exponent)
            step = 2.0 ** (exponent - self.fraction_bits)
            rounded = round(rounded / step) * step
        if rounded > self.max:
            rounded = math.inf if self.has_inf else math.nan
        return math.copysign(rounded, value)


# Parameters: IEEE 754-2019 for fp16, fp32, fp64; NVIDIA's A100 white paper for bfloat16 and TF32;
# "FP8 Formats for Deep Learning", arXiv:2209.05433, table 1, for fp8.
FP16 = FloatFormat(name="float16", label="fp16", fraction_bits=10, min_exponent=-14, max_exponent=15)
BF16 = FloatFormat(name="bfloat16", label="bf16", fraction_bits=7, min_exponent=-126, max_exponent=127)
FP32 = FloatFormat(name="float32", label="fp32", fraction_bits=23, min_exponent=-126, max_exponent=127)
FP64 = FloatFormat(name="float64", label="fp64", fraction_bits=52, min_exponent=-1022, max_exponent=1023)
TF32 = FloatFormat(name="tfloat32", label="tf32", fraction_bits=10, min_exponent=-126, max_exponent=127)
FP8_E4M3 = FloatFormat(
    name="float8_e4m3fn", label="fp8-e4m3", fraction_bits=3, min_exponent=-6, max_exponent=8, has_inf=False
)
FP8_E5M2 = FloatFormat(name="float8_e5m2", label="fp8-e5m2", fraction_bits=2, min_exponent=-14, max_exponent=15)

FORMATS = {f.name: f for f in (FP16, BF16, FP32, FP64, TF32, FP8_E4M3, FP8_E5M2)}

EDGE = 0.99
"""A number above this share of its format's limit stands for an infinity: `finfo(dtype).min`, plus a score."""
LARGEST_EPS = 1e-2
"""A larger constant is not an eps but a weight, a share or a temperature."""

Effect = Literal["zero", "subnormal", "normal", "overflow"]


def effect_of(rounded: float, format: FloatFormat) -> Effect:  # noqa: A002
    """Return what is left of a number that was rounded to a format.

    "subnormal" numbers have lost digits, and some kernels flush them to zero.
    """
    if not math.isfinite(rounded):
        return "overflow"
    if rounded == 0:
        return "zero"
    return "subnormal" if abs(rounded) < format.smallest_normal else "normal"
