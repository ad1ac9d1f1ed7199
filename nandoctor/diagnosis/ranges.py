"""Measures, in a healthy step's traces, what each module would lose in narrower formats, and the trend over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nandoctor.diagnosis.run_summary import NEAR_BITS
from nandoctor.evidence.checkup import (
    CHECKED_FORMATS,
    CheckedStep,
    Crossing,
    Fit,
    FormatFit,
    LayerRange,
    LossScaleRange,
    ValueRange,
)
from nandoctor.evidence.formats import FP16, FP32, FloatFormat
from nandoctor.evidence.trace import OpCall, TensorStats, Trace
from nandoctor.text import file_line

_LOST_SHARE = 0.01
"""The share of the sum of a module's gradient magnitudes that a loss scale may lose."""
_MAX_EXPONENT_OF_SCALE = 24
"""GradScaler starts at 2^16 and doubles; 2^24 is past what any run needs."""
_FAR = 10
_MIN_POINTS = 2
_END_OF_FP32 = FP32.max / 8
"""Larger values are masks filled with the limit of their format: `finfo(x.dtype).min` is smaller in fp16."""


@dataclass(slots=True)
class _Seen:
    """The readings of one module: samples of its tensors, and the largest magnitude with the op that has it."""

    type: str
    samples: list[NDArray[np.float32]] = field(default_factory=list)
    absmax: float = 0.0
    largest: OpCall | None = None
    count: int = 0

    def add(self, stats: TensorStats, op: OpCall | None = None) -> None:
        if stats.absmax is None or stats.absmax > _END_OF_FP32:
            return
        self.count += 1
        if stats.absmax > self.absmax or self.largest is None:
            self.absmax, self.largest = max(stats.absmax, self.absmax), op
        if stats.sample is not None:
            self.samples.append(stats.sample)


def measure_layers(reference: Trace, autocast: Trace, gradients: Mapping[str, TensorStats]) -> tuple[LayerRange, ...]:
    """Return one row for each module, in the order in which they ran.

    `reference` and `autocast` were traced op by op; `gradients` are those of the parameters at loss scale 1.
    """
    # Ops that autocast leaves in fp32 cannot overflow the low format.
    wide = {op.key for op in autocast.ops if not any(stats.dtype is autocast.format for stats in op.outputs)}
    narrow = [op for op in reference.ops if op.key not in wide]
    forward, backward = _see_forward(narrow), _see_backward(reference, narrow, gradients)
    order = list(dict.fromkeys([*forward, *backward]))
    return tuple(
        LayerRange(
            module=module,
            type=(forward.get(module) or backward[module]).type,
            values=_range_of(forward.get(module)),
            gradients=_range_of(backward.get(module)),
            largest_at=_line_of(forward.get(module)),
        )
        for module in order
    )


def _see_forward(narrow: Iterable[OpCall]) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    for op in narrow:
        _see(seen, op)
    return {module: entry for module, entry in seen.items() if entry.count}


def _see_backward(reference: Trace, narrow: Sequence[OpCall], gradients: Mapping[str, TensorStats]) -> dict[str, _Seen]:
    """Collect gradients, which have their value's format: that of an fp32 loss is rounded only where fp16 begins."""
    orders = {None, *(op.order for op in narrow)}
    weights = {tensor.path for op in narrow for tensor in op.inputs if tensor.origin == "weight"}
    types = {call.module: call.type for call in reference.calls}
    seen: dict[str, _Seen] = {}
    for op in reference.backward:
        if op.forward in orders:
            _see(seen, op)
    for name, stats in gradients.items():
        if name in weights:
            module = name.rpartition(".")[0]
            seen.setdefault(module, _Seen(types.get(module, ""))).add(stats)
    return {module: entry for module, entry in seen.items() if entry.count}


def _see(seen: dict[str, _Seen], op: OpCall) -> None:
    entry = seen.setdefault(op.module, _Seen(op.type))
    for stats in (*(tensor.stats for tensor in op.inputs), *op.outputs):
        if stats is not None:
            entry.add(stats, op)


def _range_of(seen: _Seen | None) -> ValueRange | None:
    if seen is None:
        return None
    magnitudes = [np.abs(sample[np.isfinite(sample) & (sample != 0)]).astype(np.float64) for sample in seen.samples]
    joined = np.concatenate(magnitudes) if magnitudes else np.zeros(0)
    fits = tuple(_fit(seen.absmax, joined, magnitudes, format) for format in CHECKED_FORMATS)  # noqa: A001
    return ValueRange(absmax=seen.absmax, small=_small_part(joined), formats=fits)


def _small_part(magnitudes: NDArray[np.float64]) -> float | None:
    """Return the magnitude up to which the values make up 1 % of the sum of all, or None if there are none."""
    if not magnitudes.size:
        return None
    rising = np.sort(magnitudes)
    sums = np.cumsum(rising)
    return float(rising[np.searchsorted(sums, _LOST_SHARE * sums[-1])])


def _fit(
    absmax: float,
    joined: NDArray[np.float64],
    tensors: Sequence[NDArray[np.float64]],
    format: FloatFormat,  # noqa: A002
) -> FormatFit:
    headroom = format.headroom_bits(absmax)
    fit: Fit = "overflows" if not format.holds(absmax) else "near" if headroom < NEAR_BITS else "fits"
    scaled = [tensor * (format.max / float(tensor.max())) for tensor in tensors if tensor.size]
    return FormatFit(
        format=format,
        headroom_bits=headroom,
        fit=fit,
        flushed_share=_share_below(joined, format.flush_threshold),
        flushed_share_scaled=max((_share_below(tensor, format.flush_threshold) for tensor in scaled), default=0.0),
    )


def _share_below(magnitudes: NDArray[np.float64], limit: float) -> float:
    return float(np.mean(magnitudes <= limit)) if magnitudes.size else 0.0


def _line_of(seen: _Seen | None) -> str:
    source = seen.largest.source if seen is not None and seen.largest is not None else None
    return file_line(source.file, source.line) if source is not None else ""


def find_loss_scales(layers: Iterable[LayerRange], current: float | None) -> LossScaleRange | None:
    """Return the loss scales that fit the fp16 gradients, or None if no gradient is known."""
    known = [
        (layer.module, layer.gradients) for layer in layers if layer.gradients is not None and layer.gradients.absmax
    ]
    if not known:
        return None
    largest, largest_by = min((_floor_power(FP16.max / values.absmax), module) for module, values in known)
    # If a gradient has so few non-zero values that the sample has none, only the largest is known.
    smallest, smallest_by = max(
        (_ceil_power(FP16.smallest_subnormal / (values.small or values.absmax)), module) for module, values in known
    )
    smallest = max(smallest, min(1.0, largest))  # a scale below 1 only helps against overflow
    return LossScaleRange(
        current=current, largest=largest, largest_by=largest_by, smallest=smallest, smallest_by=smallest_by
    )


def _floor_power(value: float) -> float:
    return 2.0 ** min(math.floor(math.log2(value)), _MAX_EXPONENT_OF_SCALE)


def _ceil_power(value: float) -> float:
    return 2.0 ** math.ceil(math.log2(value))


def find_crossings(steps: Sequence[CheckedStep]) -> tuple[Crossing, ...]:
    """Return the modules that grow towards fp16's limit, the nearest first."""
    dated = [checked for checked in steps if checked.step is not None]
    points: dict[str, list[tuple[int, float]]] = {}
    for checked in dated:
        for layer in checked.layers:
            if layer.values is not None and layer.values.absmax > 0 and checked.step is not None:
                points.setdefault(layer.module, []).append((checked.step, math.log2(layer.values.absmax)))
    found = [crossing for module, seen in points.items() for crossing in _extrapolate(module, seen)]
    return tuple(sorted(found, key=lambda crossing: math.inf if crossing.step is None else crossing.step))


def _extrapolate(module: str, points: Sequence[tuple[int, float]]) -> Iterator[Crossing]:
    """Fit a line through the points; yield nothing for a module that grows by no more than the fit's residual."""
    steps, bits = np.array(points, np.float64).T if points else (np.zeros(0), np.zeros(0))
    if len(set(steps)) < _MIN_POINTS:
        return
    slope, intercept = np.polyfit(steps - steps[0], bits, 1)
    span = float(steps.max() - steps.min())
    residual = float(np.abs(intercept + slope * (steps - steps[0]) - bits).max())
    if slope * span <= max(residual, 0.1):
        return
    step = float(steps[0] + (math.log2(FP16.max) - intercept) / slope)
    yield Crossing(
        module=module,
        doublings=1000 * float(slope),
        num_points=len(points),
        residual_bits=residual,
        step=step if step <= steps.max() + _FAR * span else None,
    )


def by_headroom(layers: Iterable[LayerRange]) -> list[LayerRange]:
    """Return the layers whose values are known, sorted by their headroom in fp16, the least first."""
    known = [(layer.values.fit_in(FP16).headroom_bits, layer) for layer in layers if layer.values is not None]
    return [layer for _, layer in sorted(known, key=lambda pair: pair[0])]
