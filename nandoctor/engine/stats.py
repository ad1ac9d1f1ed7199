"""Numbers about one tensor: a cheap pass for all, an exact census for the few that need one.

In: tensors as the model makes them. Out: `TensorStats`, read from the device once, at the end of the run.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from nandoctor.evidence.formats import FORMATS, FloatFormat
from nandoctor.evidence.trace import Census, TensorStats

SAMPLE_SIZE = 4096
MAX_SAMPLES_LISTED = 64

_REAL_DTYPES = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the cheap pass keeps of one tensor: three small tensors that stay on the device until they are collected."""

    shape: tuple[int, ...]
    dtype: FloatFormat
    numel: int
    limits: torch.Tensor
    sample: torch.Tensor
    census: Census | None = None
    finite_limits: tuple[float, float] | None = None
    producer: int | None = None


Readings = list[tuple[str, Reading]]
"""Readings with the place of each tensor in the value that was read."""


def format_of(dtype: torch.dtype) -> FloatFormat | None:
    """The format of a floating-point or complex dtype, None for every other."""
    return FORMATS.get(str(_REAL_DTYPES.get(dtype, dtype)).removeprefix("torch."))


def measure(tensor: torch.Tensor, *, census_for: FloatFormat | None = None) -> Reading | None:
    """Measure one tensor, or return None where there is nothing to measure (integers, empty, sparse, meta).

    The cheap pass is `torch.aminmax`, which sees NaN and both infinities in one sweep without a temporary the size
    of the tensor, and a spread sample. `census_for` asks for exact counts too, flushes judged against that format.
    The shape is that of the numbers themselves: a complex tensor's ends in 2, a nested one's starts with all rows, one
    under `torch.vmap` has the mapped dimension.
    """
    float_format = format_of(tensor.dtype)
    if float_format is None:
        return None
    values = numbers_in(tensor)
    if values is None or values.numel() == 0 or values.is_meta:
        return None
    census, finite_limits = None, None
    if census_for is not None:
        census, finite_limits = census_of(values, float_format, census_for, samples=not tensor.is_nested)
    return Reading(
        shape=tuple(values.shape),
        dtype=float_format,
        numel=values.numel(),
        limits=torch.stack(torch.aminmax(values)),
        sample=_take_sample(values),
        census=census,
        finite_limits=finite_limits,
    )


def collect(readings: Readings) -> tuple[TensorStats, ...]:
    """Bring readings from the device, all limits in one transfer, and name them by their places."""
    if not readings:
        return ()
    limits = torch.stack([reading.limits.double() for _, reading in readings]).tolist()
    return tuple(
        _summarize(reading, low, high, path) for (path, reading), (low, high) in zip(readings, limits, strict=True)
    )


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's numbers as one real, dense tensor without autograd; None for those that have none to show."""
    if format_of(tensor.dtype) is None or is_lazy(tensor):
        return None
    tensor = unwrap(tensor).detach()
    if tensor.is_nested:
        tensor = tensor.values()
    if tensor.layout != torch.strided or tensor.is_quantized or _dispatches_itself(tensor):
        return None
    if tensor.element_size() == 1:  # fp8 has storage and casts, hardly any other kernels
        return tensor.float()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor under the wrappers of `torch.vmap` and `torch.func.grad`; itself without any."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _dispatches_itself(tensor: torch.Tensor) -> bool:
    """Whether a subclass (masked, fake, distributed) decides on each operation, and so may refuse any of ours."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


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


def census_of(
    values: torch.Tensor, own: FloatFormat, target: FloatFormat, *, samples: bool = True
) -> tuple[Census, tuple[float, float] | None]:
    """The census of one strided tensor in format `own`, and the limits of its finite elements, None without any.

    Flushes to zero are judged against `target`; `samples` is False where dimension 0 is not the batch.
    """
    # Comparisons are false for NaN, so nothing below needs the finite elements picked out, which costs more than all
    # the counting: indexing by a mask takes 50 times as long as a comparison.
    magnitudes = values.abs()
    finite = magnitudes < math.inf
    num_finite, num_zero = _count(finite), values.numel() - _count(values)
    num_nan = _count(values != values)  # noqa: PLR0124 - isnan, without its detour
    num_posinf = _count(values == math.inf)
    bad = ~finite if num_finite < values.numel() else None
    census = Census(
        num_nan=num_nan,
        num_posinf=num_posinf,
        num_neginf=values.numel() - num_finite - num_nan - num_posinf,
        num_zero=num_zero,
        num_subnormal=_count(magnitudes < own.smallest_normal) - num_zero,
        smallest=_smallest(magnitudes) if num_zero < num_finite else None,
        flushed_share=(_count(magnitudes <= target.flush_threshold) - num_zero) / max(values.numel(), 1),
        first_bad_index=None if bad is None else _first_index(bad),
        samples=_bad_samples(bad) if samples and bad is not None else (),
    )
    return census, _finite_limits(values, finite) if num_finite else None


def _count(values: torch.Tensor) -> int:
    """How many are not zero, or True."""
    return int(torch.count_nonzero(values))


def _smallest(magnitudes: torch.Tensor) -> float:
    return float(magnitudes.masked_fill(magnitudes.isnan() | (magnitudes == 0), math.inf).min())


def _finite_limits(values: torch.Tensor, finite: torch.Tensor) -> tuple[float, float]:
    low, high = values.masked_fill(~finite, math.inf).min(), values.masked_fill(~finite, -math.inf).max()
    return float(low), float(high)


def _first_index(bad: torch.Tensor) -> tuple[int, ...]:
    flat = int(bad.flatten().to(torch.uint8).argmax())
    return tuple(int(i) for i in np.unravel_index(flat, tuple(bad.shape)))


def _bad_samples(bad: torch.Tensor) -> tuple[int, ...]:
    if bad.dim() == 0 or not bad.numel():
        return ()
    rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    return tuple(rows.nonzero().flatten()[:MAX_SAMPLES_LISTED].tolist())


def _summarize(reading: Reading, low: float, high: float, path: str) -> TensorStats:
    finite = math.isfinite(low) and math.isfinite(high)
    limits = (low, high) if finite else reading.finite_limits
    sample = reading.sample.float().cpu().numpy()
    p05, median, p95 = _quantiles(sample)
    return TensorStats(
        path=path,
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
        census=reading.census,
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
