"""Records of a checkup: how near a healthy step comes to the formats' limits, by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nandoctor.evidence.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat

SCHEMA = "nandoctor.checkup/2"
CHECKED_FORMATS = (FP16, BF16, FP8_E4M3, FP8_E5M2)

Fit = Literal["fits", "near", "overflows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFit:
    """How values fit a format.

    `headroom_bits` is log2(max / absmax): the doublings left, negative past the limit; `fit` is "near" with less than
    one. `flushed_share` of the non-zero elements, 0 to 1, round to zero, estimated from a sample.
    """

    format: FloatFormat
    headroom_bits: float
    fit: Fit
    flushed_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """The numbers that one module computes with in low precision.

    They are the operands and results of the ops in its own forward that autocast runs in low precision, computed in
    fp32: `absmax` is the largest magnitude, `largest_at` its line.
    """

    module: str
    type: str
    absmax: float
    formats: tuple[FormatFit, ...]
    largest_at: str = ""

    def fit_in(self, format: FloatFormat) -> FormatFit:  # noqa: A002 - the field's own name
        """Return how the values fit this format."""
        return next(fit for fit in self.formats if fit.format is format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """One healthy step: its layers in execution order, and the precision of the `run` beside fp32's."""

    schema: str = SCHEMA
    path: str
    layers: tuple[LayerRange, ...]
    run: str
    run_finite: bool
    notes: tuple[str, ...] = ()
