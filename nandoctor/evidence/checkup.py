"""Records of a checkup: how near a healthy step comes to the formats' limits, by layer, and where a run is heading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nandoctor.evidence.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat

SCHEMA = "nandoctor.checkup/1"
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
class CheckedStep:
    """One checkpoint: its layers in execution order."""

    path: str
    step: int | None
    layers: tuple[LayerRange, ...]
    run: str
    run_finite: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The step at which a module would exceed fp16's range, if log2 of its largest magnitude grew linearly.

    `doublings` is the growth in 1,000 steps, by least squares over `num_points` checkpoints; the line is off by at most
    `residual_bits`. `step` is None if it is further away than ten times the observed span.
    """

    module: str
    doublings: float
    num_points: int
    residual_bits: float
    step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """All checkpoints by step, and the modules that grow towards fp16's limit, nearest first."""

    schema: str = SCHEMA
    steps: tuple[CheckedStep, ...]
    crossings: tuple[Crossing, ...] = ()
    notes: tuple[str, ...] = ()
