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
    one. `flushed_share` of the non-zero elements, 0 to 1, round to zero; `flushed_share_scaled` do after scaling each
    tensor's largest magnitude to the format's maximum, as fp8 training does. Both are estimated from a sample.
    """

    format: FloatFormat
    headroom_bits: float
    fit: Fit
    flushed_share: float
    flushed_share_scaled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """The magnitudes of one kind of value in one module.

    `absmax` is the largest. The values up to `small` make up 1 % of the sum of all magnitudes, estimated from a sample.
    """

    absmax: float
    small: float | None
    formats: tuple[FormatFit, ...]

    def fit_in(self, format: FloatFormat) -> FormatFit:  # noqa: A002 - the field's own name
        """Return how the values fit this format."""
        return next(fit for fit in self.formats if fit.format is format)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """The numbers that one module computes with: forward `values`, and `gradients` at loss scale 1.

    `values` are the operands and results of the ops in its own forward that autocast runs in low precision, computed
    in fp32. `largest_at` is the line with the largest value.
    """

    module: str
    type: str
    values: ValueRange | None
    gradients: ValueRange | None
    largest_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleRange:
    """The loss scales at which no fp16 gradient overflows, and no module loses more than 1 % of its gradients' sum.

    `largest` and `smallest` are powers of two; `current` is the step's own, None if it has none. `largest_by` and
    `smallest_by` are the modules that determine them. If `smallest` exceeds `largest`, there is no such scale.
    """

    current: float | None
    largest: float
    largest_by: str
    smallest: float
    smallest_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """One checkpoint: its layers in execution order."""

    path: str
    step: int | None
    layers: tuple[LayerRange, ...]
    loss_scale: LossScaleRange | None
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
