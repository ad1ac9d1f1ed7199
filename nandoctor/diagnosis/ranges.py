"""Measures, in a healthy step's traces, what each module would lose in narrower formats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nandoctor.diagnosis.run_summary import NEAR_BITS
from nandoctor.evidence.checkup import CHECKED_FORMATS, Fit, FormatFit, LayerRange
from nandoctor.evidence.formats import FP16, FP32, FloatFormat
from nandoctor.evidence.trace import OpCall, TensorStats, Trace
from nandoctor.text import file_line

_END_OF_FP32 = FP32.max / 8
"""Larger values are masks filled with the limit of their format: `finfo(x.dtype).min` is smaller in fp16."""


@dataclass(slots=True)
class _Seen:
    """The readings of one module: samples of its tensors, and the largest magnitude with the op that has it."""

    type: str
    samples: list[NDArray[np.float32]] = field(default_factory=list)
    absmax: float = 0.0
    largest: OpCall | None = None

    def add(self, stats: TensorStats, op: OpCall) -> None:
        if stats.absmax is None or stats.absmax > _END_OF_FP32:
            return
        if stats.absmax > self.absmax or self.largest is None:
            self.absmax, self.largest = max(stats.absmax, self.absmax), op
        if stats.sample is not None:
            self.samples.append(stats.sample)


def measure_layers(reference: Trace, autocast: Trace) -> tuple[LayerRange, ...]:
    """Return one row for each module, in the order in which they ran; both runs were traced op by op."""
    # Ops that autocast leaves in fp32 cannot overflow the low format.
    wide = {op.key for op in autocast.ops if not any(stats.dtype is autocast.format for stats in op.outputs)}
    seen: dict[str, _Seen] = {}
    for op in reference.ops:
        if op.key not in wide:
            entry = seen.setdefault(op.module, _Seen(op.type))
            for stats in (*(tensor.stats for tensor in op.inputs), *op.outputs):
                if stats is not None:
                    entry.add(stats, op)
    return tuple(_range_of(module, entry) for module, entry in seen.items() if entry.largest is not None)


def _range_of(module: str, seen: _Seen) -> LayerRange:
    samples = [np.abs(sample[np.isfinite(sample) & (sample != 0)]) for sample in seen.samples]
    joined = np.concatenate(samples).astype(np.float64) if samples else np.zeros(0)
    source = seen.largest.source if seen.largest is not None else None
    return LayerRange(
        module=module,
        type=seen.type,
        absmax=seen.absmax,
        formats=tuple(_fit(seen.absmax, joined, format) for format in CHECKED_FORMATS),  # noqa: A001
        largest_at=file_line(source.file, source.line) if source is not None else "",
    )


def _fit(absmax: float, magnitudes: NDArray[np.float64], format: FloatFormat) -> FormatFit:  # noqa: A002
    headroom = format.headroom_bits(absmax)
    fit: Fit = "overflows" if not format.holds(absmax) else "near" if headroom < NEAR_BITS else "fits"
    flushed = float(np.mean(magnitudes <= format.flush_threshold)) if magnitudes.size else 0.0
    return FormatFit(format=format, headroom_bits=headroom, fit=fit, flushed_share=flushed)


def by_headroom(layers: Iterable[LayerRange]) -> list[LayerRange]:
    """Return the layers sorted by their headroom in fp16, the least first."""
    return sorted(layers, key=lambda layer: layer.fit_in(FP16).headroom_bits)
