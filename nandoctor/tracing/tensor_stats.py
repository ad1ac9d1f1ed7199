"""Statistics of one tensor: a cheap pass for all, exact counts for the few that need them.

Results are copied from the device once, at the end of the run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from nandoctor.dumps.tensors import as_stored, comparable_values, holds_finite
from nandoctor.evidence.formats import FORMATS, FP16, FP32, FP64, FloatFormat
from nandoctor.evidence.trace import NonfiniteCounts, TensorStats
from nandoctor.torch_compat import answers_itself, outside_transforms, tree_tensors, unwrap, without_autocast
from nandoctor.tracing.exact_counts import count_exactly

SAMPLE_SIZE = 1024
_LOWEST = 0.05

_FORMATS = {getattr(torch, name): FORMATS[name] for name in FORMATS if hasattr(torch, name)}
_FORMATS |= {torch.complex32: FP16, torch.complex64: FP32, torch.complex128: FP64}
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Reading(NamedTuple):
    """What the cheap pass keeps of one tensor.

    `limits` and `sample` stay on a device other than the CPU until they are collected. For a CPU tensor they are there
    at once, the sample in fp32.
    """

    shape: tuple[int, ...]
    dtype: FloatFormat
    numel: int
    limits: torch.Tensor | tuple[float, float]
    sample: torch.Tensor | NDArray[np.float32]
    counts: NonfiniteCounts | None = None
    finite_limits: tuple[float, float] | None = None
    producer: int | None = None


Readings = list[tuple[str, Reading]]
"""Readings with the place of each tensor in the value that was read."""


def format_of(dtype: torch.dtype) -> FloatFormat | None:
    """Return the format of a floating-point or complex dtype, None for any other."""
    return _FORMATS.get(dtype)


def measure(tensor: torch.Tensor, *, counts: bool = False) -> Reading | None:
    """Measure one tensor, or return None if there is nothing to measure (integers, empty, meta).

    The cheap pass is `torch.aminmax`, which sees NaN and both infinities in one sweep without a temporary the size
    of the tensor, and a spread sample. `counts` asks for exact counts too.
    The shape is that of the numbers themselves: a complex tensor's ends in 2, a nested one's starts with all rows, a
    sparse one's with its stored values, one under `torch.vmap` has the mapped dimension.
    """
    values = numbers_in(tensor)
    if values is None or values.numel() == 0 or values.is_meta:
        return None
    limits, sample = _read(values)
    reading = Reading(tuple(values.shape), _FORMATS[tensor.dtype], values.numel(), limits, sample)
    return add_counts(reading, tensor) if counts else reading


def add_counts(reading: Reading, tensor: torch.Tensor, *, place: bool = False) -> Reading:
    """Return the reading with exact counts added; `place` asks where non-finite elements are."""
    values = numbers_in(tensor)
    assert values is not None
    rows_are_samples = not tensor.is_nested and tensor.layout == torch.strided
    counts, limits = count_exactly(values, samples=rows_are_samples, place=place)
    return reading._replace(counts=counts, finite_limits=limits)


def is_finite(reading: Reading | None) -> bool:
    """Return True if neither NaN nor infinity was read; this waits for the device."""
    return reading is None or all(map(math.isfinite, limits_of(reading)))


def limits_of(reading: Reading) -> Sequence[float]:
    """Return the smallest and largest value, both NaN if there is a NaN; this waits for the device."""
    limits = reading.limits
    return limits if isinstance(limits, tuple) else limits.tolist()


def all_finite(tensor: torch.Tensor) -> bool:
    """Return True if a tensor holds neither NaN nor infinity."""
    values = numbers_in(tensor)
    return values is None or holds_finite(values)


def has_nonfinite(value: Any, *, but_masks: bool) -> bool:
    """Return True if any tensor in a value holds NaN or an infinity; `but_masks`: -Inf alone does not count."""
    readings = filter(None, map(measure, tree_tensors(value)))
    return not all(limits_of(reading)[1] < math.inf if but_masks else is_finite(reading) for reading in readings)


def measure_all(tensors: Iterable[tuple[str, torch.Tensor]], *, counts: bool = False) -> tuple[TensorStats, ...]:
    """Return the statistics of all tensors that have numbers, by name; `counts` as in `measure`."""
    return collect([(name, read) for name, tensor in tensors if (read := measure(tensor, counts=counts))])


def collect(readings: Readings) -> tuple[TensorStats, ...]:
    """Copy readings from the device, and name them by their places."""
    return collect_all([readings])[0]


def collect_all(groups: Sequence[Readings]) -> list[tuple[TensorStats, ...]]:
    """Copy many groups of readings from the device in two transfers; a reading in several is summarized once."""
    distinct = {id(reading): reading for group in groups for _, reading in group}
    limits = _fetch([reading.limits for reading in distinct.values()], torch.float64)
    samples = _fetch([reading.sample for reading in distinct.values()], torch.float32)
    rows = zip(distinct.items(), limits, samples, strict=True)
    stats = {key: _summarize(reading, float(low), float(high), sample) for (key, reading), (low, high), sample in rows}
    return [
        tuple(replace(stats[id(reading)], path=path) if path else stats[id(reading)] for path, reading in group)
        for group in groups
    ]


def _fetch(values: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Return the values with flat tensors as arrays on the host, using one transfer per device."""
    fetched = list(values)
    for device in {value.device for value in values if isinstance(value, torch.Tensor)}:
        places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.device == device]
        joined = torch.cat([values[place].to(dtype) for place in places]).cpu().numpy()
        end = 0
        for place in places:
            start, end = end, end + values[place].numel()
            fetched[place] = joined[start:end]
    return fetched


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor's numbers as one real, dense tensor without autograd, or None if it shows none."""
    if format_of(tensor.dtype) is None or is_lazy(tensor):
        return None
    tensor = plain_part(tensor)
    if answers_itself(tensor):
        return None
    tensor = tensor.detach().values() if tensor.is_nested else tensor.detach()
    is_known = tensor.layout in (torch.strided, *_SPARSE) and not tensor.is_quantized
    return comparable_values(tensor) if is_known else None


def plain_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside a wrapper: under `torch.vmap`, or in a tensor class that lists its parts.

    Of several parts (in fp8 the numbers and their scale) it is one that is non-finite, else the largest. A tensor whose
    class lists none is returned as it is.
    """
    tensor = unwrap(tensor)
    while answers_itself(tensor) and (parts := _parts(tensor)):
        tensor = next((part for part in parts if not all_finite(part)), max(parts, key=torch.Tensor.numel))
    return tensor


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the floating-point tensors listed by `__tensor_flatten__`, the protocol of torch's own subclasses."""
    with suppress(Exception):  # runs the class's own code
        named = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        tensors = (part for part in named if isinstance(part, torch.Tensor) and not part.is_meta)
        return [part for part in tensors if format_of(part.dtype) is not None]
    return []


def is_unreadable(tensor: torch.Tensor) -> bool:
    """Return True if the numbers of a floating-point tensor cannot be read."""
    return format_of(tensor.dtype) is not None and answers_itself(tensor) and numbers_in(tensor) is None


def _read(values: torch.Tensor) -> tuple[Any, Any]:
    """Return the limits and the sample of a `Reading`, without waiting for a device other than the CPU."""
    numel = values.numel()
    with outside_transforms(), without_autocast():
        sample = values.reshape(-1) if numel <= SAMPLE_SIZE else values.take(_sample_indices(numel, values.device))
        if not values.is_cpu:
            ends = torch.aminmax(as_stored(values))
            # Without `out`, bf16 autocast refuses fp16.
            return torch.stack(ends, out=ends.min.new_empty(0)), sample.clone()
        numbers = sample.to(torch.float32, copy=True).numpy()
        if math.isnan(numbers.min()):  # usual after a failure, and both limits are then NaN
            return (math.nan, math.nan), numbers
        low, high = torch.aminmax(as_stored(values))
        return (low.item(), high.item()), numbers


@functools.lru_cache(maxsize=256)
def _sample_indices(numel: int, device: torch.device) -> torch.Tensor:
    """Return evenly spread indices that avoid the shape's periods: the additive recurrence of the golden ratio.

    A plain stride that divides a dimension would fall on the same column or channel each time.
    Source: Roberts, "The unreasonable effectiveness of quasirandom sequences" (2018), for one dimension.
    """
    fractions = torch.arange(1, SAMPLE_SIZE + 1, dtype=torch.float64, device="cpu") * _GOLDEN_RATIO
    return (fractions.frac() * numel).long().clamp_(max=numel - 1).to(device)


def _summarize(reading: Reading, low: float, high: float, sample: NDArray[np.float32]) -> TensorStats:
    finite = math.isfinite(low) and math.isfinite(high)
    limits = (low, high) if finite else reading.finite_limits
    p05, median, p95 = _quantiles(sample)
    return TensorStats(
        path="",
        shape=reading.shape,
        dtype=reading.dtype,
        numel=reading.numel,
        finite=finite,
        min=limits[0] if limits else None,
        max=limits[1] if limits else None,
        absmax=max(abs(limits[0]), abs(limits[1])) if limits else None,
        p05=p05,
        median=median,
        p95=p95,
        counts=reading.counts,
        producer=reading.producer,
        sample=sample,
    )


def _quantiles(sample: NDArray[np.float32]) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the 5 %, 50 % and 95 % quantiles of a sample's non-zero finite magnitudes."""
    magnitudes = np.abs(sample)
    counted = np.sort(magnitudes[(magnitudes > 0) & (magnitudes < math.inf)])  # false for NaN
    last = counted.size - 1
    if last < 0:
        return None, None, None
    return float(counted[round(_LOWEST * last)]), float(counted[round(0.5 * last)]), float(counted[round(0.95 * last)])
