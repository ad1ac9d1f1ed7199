"""How near a healthy step comes to the ends of the formats, layer by layer, and where a run is heading."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nandoctor.evidence.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat

SCHEMA = "nandoctor.checkup/1"
CHECKED_FORMATS = (FP16, BF16, FP8_E4M3, FP8_E5M2)

Fit = Literal["fits", "near", "overflows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFit:
    """Values in a format.

    `headroom_bits` is log2(max / absmax): the doublings left, negative past the end; `fit` is "near" with less than
    one. `flushed_share` of the non-zero elements, 0 to 1, round to zero; `flushed_share_scaled` where a scale of the
    tensor's own puts its largest magnitude at the end of the format, as fp8 training does. Both are by a sample.
    """

    format: FloatFormat
    headroom_bits: float
    fit: Fit
    flushed_share: float
    flushed_share_scaled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """Magnitudes of the values of one kind in one module.

    `absmax` is the largest. The values up to `small` make up 1 % of the sum of all magnitudes, by a sample.
    """

    absmax: float
    small: float | None
    formats: tuple[FormatFit, ...]

    def fit_in(self, format: FloatFormat) -> FormatFit:  # noqa: A002 - the field's own name
        """What becomes of the values in this format."""
        return next(fit for fit in self.formats if fit.format is format)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """What one module computes with: `values` in the forward, `gradients` at loss scale 1 in the backward.

    `values` are the operands and results of the operations in its own forward that autocast runs in low precision,
    computed in fp32. `largest_at` is the line that has the largest.
    """

    module: str
    type: str
    values: ValueRange | None
    gradients: ValueRange | None
    largest_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleRange:
    """The loss scales at which no fp16 gradient overflows, and no module loses more than 1 % of its gradients' sum.

    `largest` and `smallest` are powers of two; `current` is the step's own, None where it has none. `largest_by` and
    `smallest_by` are the modules that set them. Where `smallest` is above `largest` there is no such scale.
    """

    current: float | None
    largest: float
    largest_by: str
    smallest: float
    smallest_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """One checkpoint: its layers in the order in which they ran."""

    path: str
    step: int | None
    layers: tuple[LayerRange, ...]
    loss_scale: LossScaleRange | None
    run: str
    run_finite: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """When a module would leave fp16, if log2 of its largest magnitude went on as a straight line of the step.

    `doublings` are those in 1,000 steps, by least squares over `num_points` checkpoints, which the line misses by
    `residual_bits` at most. `step` is None where that is more than ten times the observed span away.
    """

    module: str
    doublings: float
    num_points: int
    residual_bits: float
    step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """All checkpoints, by their steps, and the modules that grow towards the end of fp16, the nearest first."""

    schema: str = field(default=SCHEMA)
    steps: tuple[CheckedStep, ...]
    crossings: tuple[Crossing, ...] = ()
    notes: tuple[str, ...] = ()
