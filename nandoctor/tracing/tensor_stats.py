"""Numbers about one tensor: a cheap pass for all, exact counts for the few that need them.

Statistics are read from the device once, at the end of the run.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from nandoctor.evidence.formats import FORMATS, FP16, FP32, FP64, FloatFormat
from nandoctor.evidence.trace import NonfiniteCounts, TensorStats
from nandoctor.torch_compat import answers_itself, sparse_values, unwrap
from nandoctor.tracing.placement import count_exponents, count_samples, place_nonfinite

SAMPLE_SIZE = 1024
MAX_SAMPLES_LISTED = 64

_FORMATS = {getattr(torch, name): FORMATS[name] for name in FORMATS if hasattr(torch, name)}
_FORMATS |= {torch.complex32: FP16, torch.complex64: FP32, torch.complex128: FP64}
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the cheap pass keeps of one tensor: three small tensors that stay on the device until they are collected."""

    shape: tuple[int, ...]
    dtype: FloatFormat
    numel: int
    limits: torch.Tensor
    sample: torch.Tensor
    counts: NonfiniteCounts | None = None
    finite_limits: tuple[float, float] | None = None
    producer: int | None = None


Readings = list[tuple[str, Reading]]
"""Readings with the place of each tensor in the value that was read."""


def format_of(dtype: torch.dtype) -> FloatFormat | None:
    """The format of a floating-point or complex dtype, None for every other."""
    return _FORMATS.get(dtype)


def measure(
    tensor: torch.Tensor, *, counts_for: FloatFormat | None = None, place: bool = False, per_sample: bool = False
) -> Reading | None:
    """Measure one tensor, or return None where there is nothing to measure (integers, empty, meta).

    The cheap pass is `torch.aminmax`, which sees NaN and both infinities in one sweep without a temporary the size
    of the tensor, and a spread sample. `counts_for` asks for exact counts too, flushes judged against that format;
    `place` and `per_sample` are those of `count_exactly`.
    The shape is that of the numbers themselves: a complex tensor's ends in 2, a nested one's starts with all rows, a
    sparse one's with its stored values, one under `torch.vmap` has the mapped dimension.
    """
    float_format = format_of(tensor.dtype)
    if float_format is None:
        return None
    values = numbers_in(tensor)
    if values is None or values.numel() == 0 or values.is_meta:
        return None
    counts, finite_limits = None, None
    if counts_for is not None:
        rows_are_samples = not tensor.is_nested and tensor.layout == torch.strided
        counts, finite_limits = count_exactly(
            values, float_format, counts_for, samples=rows_are_samples, place=place, per_sample=per_sample
        )
    return Reading(
        shape=tuple(values.shape),
        dtype=float_format,
        numel=values.numel(),
        limits=torch.stack(torch.aminmax(_as_stored(values))),
        sample=_take_sample(values),
        counts=counts,
        finite_limits=finite_limits,
    )


def is_finite(reading: Reading | None) -> bool:
    """Tell whether no NaN and no infinity was read; this waits for the device."""
    return reading is None or bool(torch.isfinite(reading.limits).all())


def all_finite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds no NaN and no infinity: one sweep, where `torch.isfinite` takes ten times as long."""
    values = numbers_in(tensor)
    if values is None or values.numel() == 0:
        return True
    return all(math.isfinite(limit) for limit in torch.aminmax(_as_stored(values)))


def measure_all(
    tensors: Iterable[tuple[str, torch.Tensor]], *, counts_for: FloatFormat | None = None
) -> tuple[TensorStats, ...]:
    """The statistics of all that have numbers, by their names; `counts_for` as in `measure`."""
    readings = [(name, measure(tensor, counts_for=counts_for)) for name, tensor in tensors]
    return collect([(name, reading) for name, reading in readings if reading is not None])


def collect(readings: Readings) -> tuple[TensorStats, ...]:
    """Bring readings from the device, and name them by their places."""
    return collect_all([readings])[0]


def collect_all(groups: Sequence[Readings]) -> list[tuple[TensorStats, ...]]:
    """Bring many groups of readings from the device in two transfers; what stands in several is summed up once."""
    distinct = {id(reading): reading for group in groups for _, reading in group}
    limits = _fetch([reading.limits.double() for reading in distinct.values()])
    samples = _fetch([reading.sample.float() for reading in distinct.values()])
    stats = {
        key: _summarize(reading, float(low), float(high), sample)
        for (key, reading), (low, high), sample in zip(distinct.items(), limits, samples, strict=True)
    }
    return [tuple(replace(stats[id(reading)], path=path) for path, reading in group) for group in groups]


def _fetch(tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Flat tensors on the host, with one transfer from each device."""
    fetched: dict[int, NDArray[Any]] = {}
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        ends = list(itertools.accumulate(tensors[place].numel() for place in places))
        joined = torch.cat([tensors[place] for place in places]).cpu().numpy()
        fetched |= zip(places, np.split(joined, ends[:-1]), strict=True)
    return [fetched[place] for place in range(len(tensors))]


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's numbers as one real, dense tensor without autograd; None for those that have none to show."""
    if format_of(tensor.dtype) is None or is_lazy(tensor):
        return None
    tensor = plain_part(tensor)
    if answers_itself(tensor):
        return None
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = tensor.values()
    elif tensor.layout in _SPARSE:
        tensor = sparse_values(tensor)
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    if tensor.element_size() == 1:  # fp8 has storage and casts, hardly any other kernels
        return tensor.float()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def plain_part(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside of one that wraps it: under `torch.vmap`, or in a class of its own that lists its parts.

    Of several parts (the numbers and their scale in fp8) it is one that is non-finite, else the largest. A class that
    lists none comes back as it is.
    """
    tensor = unwrap(tensor)
    while answers_itself(tensor) and (parts := _parts(tensor)):
        tensor = next((part for part in parts if not all_finite(part)), max(parts, key=torch.Tensor.numel))
    return tensor


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The floating-point tensors that a class lists by `__tensor_flatten__`, the protocol of torch's own subclasses."""
    with suppress(Exception):  # the class's own code
        named = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        tensors = (part for part in named if isinstance(part, torch.Tensor) and not part.is_meta)
        return [part for part in tensors if format_of(part.dtype) is not None]
    return []


def is_unreadable(tensor: torch.Tensor) -> bool:
    """Tell whether the numbers of a floating-point tensor cannot be had."""
    return format_of(tensor.dtype) is not None and answers_itself(tensor) and numbers_in(tensor) is None


def _as_stored(values: torch.Tensor) -> torch.Tensor:
    """The same numbers in the order in which they lie in memory: reductions over another take up to 20 times as long.

    That is the lot of convolutions in channels_last and of attention's transposed heads.
    """
    if values.is_contiguous():
        return values
    strides = values.stride()
    return values.permute(sorted(range(values.dim()), key=lambda dim: strides[dim], reverse=True))


def _take_sample(values: torch.Tensor) -> torch.Tensor:
    if values.numel() <= SAMPLE_SIZE:
        return values.flatten().clone()
    return torch.take(values, _sample_indices(values.numel(), values.device))


@functools.lru_cache(maxsize=256)
def _sample_indices(numel: int, device: torch.device) -> torch.Tensor:
    """Evenly spread indices that keep clear of the shape's periods: the additive recurrence of the golden ratio.

    A plain stride would fall on the same column or channel each time where it divides a dimension.
    Source: Roberts, "The unreasonable effectiveness of quasirandom sequences" (2018), for one dimension.
    """
    fractions = torch.arange(1, SAMPLE_SIZE + 1, dtype=torch.float64, device="cpu") * _GOLDEN_RATIO
    return (fractions.frac() * numel).long().clamp_(max=numel - 1).to(device)


def count_exactly(
    values: torch.Tensor,
    own: FloatFormat,
    target: FloatFormat,
    *,
    samples: bool = True,
    place: bool = False,
    per_sample: bool = False,
) -> tuple[NonfiniteCounts, tuple[float, float] | None]:
    """The counts of one strided tensor in format `own`, and the limits of its finite elements, None without any.

    Flushes to zero are judged against `target`; `samples` is False where dimension 0 is not the batch. `place` asks
    where non-finite elements are, `per_sample` for the samples and exponents of any tensor.
    """
    # Everything is counted by comparisons, which are false for NaN: to pick out the finite elements first, by a mask
    # as index, takes ten times as long as all of the counting.
    magnitudes = values.abs()
    finite = magnitudes < math.inf
    num_finite = _count(finite)
    num_zero = values.numel() - _count(values) if num_finite else 0
    num_bad = values.numel() - num_finite
    num_nan = _count(torch.isnan(values)) if num_bad else 0
    num_posinf = _count(values == math.inf) if num_bad > num_nan else 0
    smallest = _smallest(magnitudes, all_count=not (num_bad or num_zero)) if num_finite > num_zero else math.inf

    def num_up_to(limit: float) -> int:
        return _count(magnitudes <= limit) - num_zero if smallest <= limit else 0

    first_bad_index, nonfinite_samples = _locate(~finite, everywhere=not num_finite) if num_bad else (None, ())
    counts = NonfiniteCounts(
        num_nan=num_nan,
        num_posinf=num_posinf,
        num_neginf=num_bad - num_nan - num_posinf,
        num_zero=num_zero,
        num_subnormal=num_up_to(own.smallest_normal - own.smallest_subnormal),
        smallest=smallest if smallest < math.inf else None,
        flushed_share=num_up_to(target.flush_threshold) / max(values.numel(), 1),
        first_bad_index=first_bad_index,
        samples=nonfinite_samples if samples else (),
        by_sample=count_samples(magnitudes, finite, any_finite=num_finite > 0)
        if samples and (num_bad or per_sample)
        else (),
        exponents=count_exponents(magnitudes) if per_sample else (),
        grid=place_nonfinite(~finite) if place and num_bad else None,
    )
    return counts, _finite_limits(values, finite if num_bad else None) if num_finite else None


def _count(values: torch.Tensor) -> int:
    """How many are True, or not zero."""
    return int(torch.count_nonzero(values))


def _smallest(magnitudes: torch.Tensor, *, all_count: bool) -> float:
    """The smallest that is neither zero nor NaN; with `all_count` there is none of either."""
    return float((magnitudes if all_count else torch.where(magnitudes > 0, magnitudes, math.inf)).min())


def _finite_limits(values: torch.Tensor, finite: torch.Tensor | None) -> tuple[float, float]:
    """Smallest and largest of those marked `finite`, of all where it is None."""
    if finite is None:
        low, high = torch.aminmax(values)
    else:
        low, high = torch.where(finite, values, math.inf).min(), torch.where(finite, values, -math.inf).max()
    return float(low), float(high)


def _locate(nonfinite: torch.Tensor, *, everywhere: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The index of the first True, and the indices along dimension 0 that hold one."""
    if nonfinite.dim() == 0:
        return (), ()
    if everywhere:
        return (0,) * nonfinite.dim(), tuple(range(min(len(nonfinite), MAX_SAMPLES_LISTED)))
    rows = nonfinite.flatten(1).any(1) if nonfinite.dim() > 1 else nonfinite
    nonfinite_rows = rows.nonzero().flatten()
    first_row = int(nonfinite_rows[0])
    inner = int(nonfinite[first_row].flatten().to(torch.uint8).argmax())
    first = (first_row, *(int(i) for i in np.unravel_index(inner, tuple(nonfinite.shape[1:]))))
    return first, tuple(nonfinite_rows[:MAX_SAMPLES_LISTED].tolist())


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


def _quantiles(sample: NDArray[np.float32]) -> tuple[float | None, float | None, float | None]:
    magnitudes = np.abs(sample)
    magnitudes = np.sort(magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)])
    if not magnitudes.size:
        return None, None, None
    last = magnitudes.size - 1
    p05, median, p95 = (float(magnitudes[round(q * last)]) for q in (0.05, 0.5, 0.95))
    return p05, median, p95
