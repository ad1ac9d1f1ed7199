"""Exact counts of one tensor: what is NaN, infinite, zero, subnormal, and in which samples.

Everything is counted on the integers that the numbers are stored as, which order magnitudes as the numbers themselves:
numpy compares those of a CPU's five to ten times as fast as torch compares fp16. On another device torch does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from nandoctor.evidence.formats import FORMATS, FloatFormat
from nandoctor.evidence.trace import NonfiniteCounts, SampleStats
from nandoctor.text import dtype_name
from nandoctor.torch_compat import plain_torch, unwrap
from nandoctor.tracing.placement import MAX_SAMPLES, count_exponents, place_nonfinite

MAX_SAMPLES_LISTED = 64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Limits = tuple[float, float]


class _Stored(NamedTuple):
    """A tensor's numbers as integers, with their signs and without; those above `infinity` are NaN.

    An array of numpy's for a tensor on the CPU, else a tensor: both have the operators that are used here.
    """

    signed: Any
    magnitudes: Any
    sign: int
    infinity: int
    format: FloatFormat

    @staticmethod
    def of(values: torch.Tensor) -> _Stored:
        """What lies in the tensor's own memory."""
        kind = _INTEGERS[values.element_size()]
        with plain_torch():  # a transform of torch.func would wrap what it gives
            integers = unwrap(values).detach().resolve_neg().view(kind)
            signed: Any = integers.numpy() if values.device.type == "cpu" else integers
        stored = FORMATS[dtype_name(values.dtype)]
        infinity = (stored.max_exponent - stored.min_exponent + 2) << stored.fraction_bits
        limits = torch.iinfo(kind)
        return _Stored(signed, signed & limits.max, limits.min, infinity, stored)


def count_exactly(
    values: torch.Tensor,
    own: FloatFormat,
    target: FloatFormat,
    *,
    samples: bool = True,
    place: bool = False,
    per_sample: bool = False,
) -> tuple[NonfiniteCounts, Limits | None]:
    """The counts of one strided tensor in format `own`, and the limits of its finite elements, None without any.

    Flushes to zero are judged against `target`; `samples` is False where dimension 0 is not the batch. `place` asks
    where non-finite elements are, `per_sample` for the samples and exponents of any tensor.
    """
    stored = _Stored.of(values)
    nonfinite = stored.magnitudes >= stored.infinity
    num_bad = _count(nonfinite)
    num_finite = values.numel() - num_bad
    num_zero = _count(stored.magnitudes == 0) if num_finite else 0
    num_nan = _count(stored.magnitudes > stored.infinity) if num_bad else 0
    num_posinf = _count(stored.signed == stored.infinity) if num_bad > num_nan else 0
    smallest = _smallest(stored) if num_finite > num_zero else math.inf

    def num_up_to(limit: float) -> int:
        return _count(stored.magnitudes <= _last_up_to(limit, stored.format)) - num_zero if smallest <= limit else 0

    mask = torch.as_tensor(nonfinite)
    first_bad_index, nonfinite_samples = _locate(mask, everywhere=not num_finite) if num_bad else (None, ())
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
        by_sample=_count_samples(stored, nonfinite) if samples and (num_bad or per_sample) else (),
        exponents=count_exponents(values.abs()) if per_sample else (),
        grid=place_nonfinite(mask) if place and num_bad else None,
    )
    return counts, _finite_limits(values, stored, nonfinite, counts) if num_finite else None


def find_nonfinite(values: torch.Tensor) -> torch.Tensor:
    """The mask of what is NaN or infinite, many times as fast as `~torch.isfinite(values)`."""
    stored = _Stored.of(values)
    return torch.as_tensor(stored.magnitudes >= stored.infinity)


def _count(mask: Any) -> int:
    return int(torch.count_nonzero(mask) if isinstance(mask, torch.Tensor) else np.count_nonzero(mask))


def _number(integer: int, stored: FloatFormat) -> float:
    """The magnitude that an integer stands for."""
    exponent, fraction = integer >> stored.fraction_bits, integer & ((1 << stored.fraction_bits) - 1)
    if exponent:
        fraction += 1 << stored.fraction_bits
    return math.ldexp(fraction, stored.min_exponent + max(exponent - 1, 0) - stored.fraction_bits)


def _last_up_to(limit: float, stored: FloatFormat) -> int:
    """The integer of the largest magnitude that is no larger than `limit`, which is no larger than the format's own."""
    exponent = max(math.frexp(limit)[1] - 1, stored.min_exponent)
    steps = math.floor(math.ldexp(limit, stored.fraction_bits - exponent))
    return steps + ((exponent - stored.min_exponent) << stored.fraction_bits)


def _smallest(stored: _Stored) -> float:
    """The smallest magnitude that is not zero: less one, zero is the largest of all."""
    less = stored.magnitudes - 1
    less &= ~stored.sign
    smallest = int(less.min()) + 1
    return _number(smallest, stored.format) if smallest < stored.infinity else math.inf


def _finite_limits(values: torch.Tensor, stored: _Stored, nonfinite: Any, counts: NonfiniteCounts) -> Limits:
    """Smallest and largest of the finite elements."""
    if not counts.num_bad:
        limits = torch.aminmax(values)
        return float(limits.min), float(limits.max)
    # What is not finite counts as zero, and so does whatever has the other sign.
    finite = ~nonfinite
    highest = int((stored.signed * finite).max())
    lowest = int(((stored.signed ^ stored.sign) * finite).max())
    high, low = _number(max(highest, 0), stored.format), -_number(max(lowest, 0), stored.format)
    smallest = 0.0 if counts.num_zero or counts.smallest is None else counts.smallest
    return low or smallest, high or 0.0 - smallest


def _count_samples(stored: _Stored, nonfinite: Any) -> tuple[SampleStats, ...]:
    """The non-finite elements and the largest finite magnitude of each of the first MAX_SAMPLES along dimension 0."""
    if nonfinite.ndim < 2:
        return ()
    counted = []
    for mask, magnitudes in zip(nonfinite[:MAX_SAMPLES], stored.magnitudes[:MAX_SAMPLES], strict=True):
        num_bad, size = _count(mask), math.prod(mask.shape)
        kept = magnitudes * ~mask if num_bad else magnitudes
        absmax = _number(int(kept.max()), stored.format) if num_bad < size else None
        counted.append(SampleStats(num_bad=num_bad, absmax=absmax))
    return tuple(counted)


def _locate(nonfinite: torch.Tensor, *, everywhere: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The index of the first True, and the indices along dimension 0 that hold one."""
    if nonfinite.dim() == 0:
        return (), ()
    if everywhere:
        return (0,) * nonfinite.dim(), tuple(range(min(len(nonfinite), MAX_SAMPLES_LISTED)))
    bytes_ = nonfinite.view(torch.uint8)  # which are reduced many times as fast as truth values
    rows = bytes_.flatten(1).amax(1) if nonfinite.dim() > 1 else bytes_
    nonfinite_rows = rows.nonzero().flatten()
    first_row = int(nonfinite_rows[0])
    inner = int(bytes_[first_row].flatten().argmax())
    first = (first_row, *(int(i) for i in np.unravel_index(inner, tuple(nonfinite.shape[1:]))))
    return first, tuple(nonfinite_rows[:MAX_SAMPLES_LISTED].tolist())
