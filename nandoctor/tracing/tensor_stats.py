"""Finds every tensor in a value and measures it: a cheap pass for all, exact counts for the few that need them.

Results are copied from the device once, at the end of the run. Exact counts are made on the stored bits read as
integers, which order magnitudes as the numbers do, and which a CPU compares several times as fast as fp16.
"""

from __future__ import annotations

import enum
import functools
import math
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.dumps.tensors import as_stored, comparable_values, holds_finite
from nandoctor.evidence.formats import FORMATS, FP16, FP32, FP64, FloatFormat
from nandoctor.evidence.trace import NonfiniteCounts, TensorStats
from nandoctor.text import MAX_SAMPLES_LISTED
from nandoctor.torch_compat import (
    answers_itself,
    outside_transforms,
    plain_torch,
    tree_tensors,
    unwrap,
    without_autocast,
)
from nandoctor.trees import BEYOND, Parts, attributes, once, parts, spell, walk

SAMPLE_SIZE = 1024
_QUANTILES = (0.05, 0.5, 0.95)

_FORMATS = {getattr(torch, name): FORMATS[name] for name in FORMATS if hasattr(torch, name)}
_FORMATS |= {torch.complex32: FP16, torch.complex64: FP32, torch.complex128: FP64}
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Reading(NamedTuple):
    """What the cheap pass keeps of one tensor; `limits` and `sample` stay on its device until they are collected."""

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


def add_counts(reading: Reading, tensor: torch.Tensor) -> Reading:
    """Return the reading with exact counts added."""
    values = numbers_in(tensor)
    assert values is not None
    rows_are_samples = not tensor.is_nested and tensor.layout == torch.strided
    counts, limits = count_exactly(values, samples=rows_are_samples)
    return reading._replace(counts=counts, finite_limits=limits)


def is_finite(reading: Reading | None) -> bool:
    """Return True if neither NaN nor infinity was read; this waits for the device."""
    return reading is None or all(map(math.isfinite, limits_of(reading)))


def limits_of(reading: Reading) -> Sequence[float]:
    """Return the smallest and largest value, both NaN if there is a NaN; this waits for the device."""
    limits: list[float] = reading.limits.tolist()
    return limits


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


def _fetch(values: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Any]:
    """Return flat tensors as arrays on the host, using one transfer per device."""
    fetched: list[Any] = [None] * len(values)
    for device in {value.device for value in values}:
        places = [place for place, value in enumerate(values) if value.device == device]
        joined = torch.cat([values[place].to(dtype) for place in places]).cpu().numpy()
        end = 0
        for place in places:
            start, end = end, end + values[place].numel()
            fetched[place] = joined[start:end].copy()  # a view would keep all the others
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


def _read(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the limits and the sample of a `Reading`, without waiting for the device."""
    numel = values.numel()
    with outside_transforms(), without_autocast():
        few = numel <= SAMPLE_SIZE
        sample = values.reshape(-1).clone() if few else values.take(_sample_indices(numel, values.device))
        ends = torch.aminmax(as_stored(values))
        # Without `out`, bf16 autocast refuses fp16.
        return torch.stack(ends, out=ends.min.new_empty(0)), sample


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
    magnitudes = np.abs(sample)
    counted = np.sort(magnitudes[(magnitudes > 0) & (magnitudes < math.inf)])  # false for NaN
    last = counted.size - 1
    p05, median, p95 = (float(counted[round(share * last)]) if last >= 0 else None for share in _QUANTILES)
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


_AT_ONCE = 1 << 16
"""On a CPU, temporaries of so many elements stay in the processor's cache."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's own memory as signed integers."""
    return unwrap(values).detach().resolve_neg().view(_INTEGERS[values.element_size()])


def _magnitudes(integers: torch.Tensor) -> torch.Tensor:
    return integers & torch.iinfo(integers.dtype).max  # without the sign bit


def _infinity(dtype: torch.dtype) -> int:
    """Return the integer that infinity is stored as; a larger magnitude is NaN."""
    return int(torch.full((), math.inf, dtype=dtype).view(_INTEGERS[dtype.itemsize]))


def _tally(signed: torch.Tensor, infinity: int) -> tuple[int, ...]:
    """Count the elements of one piece that are non-finite, NaN, +Inf and zero.

    Three integers follow: of the smallest magnitude above zero, of the lowest and of the highest finite value.
    """
    size, sign, magnitudes = signed.numel(), torch.iinfo(signed.dtype).min, _magnitudes(signed)
    smallest = int(magnitudes.min()) if size else infinity
    if smallest >= infinity:  # no element is finite, so there are no limits
        num_nan = size if smallest > infinity else int((magnitudes > infinity).count_nonzero())
        num_posinf = int((signed == infinity).count_nonzero()) if num_nan < size else 0
        return size, num_nan, num_posinf, 0, infinity, 0, 0
    num_bad = num_nan = num_posinf = num_zero = 0
    lowest, highest = int((signed ^ sign).max()), int(signed.max())
    if max(lowest, highest) >= infinity:
        nonfinite = magnitudes >= infinity
        num_bad, num_nan = int(nonfinite.count_nonzero()), int((magnitudes > infinity).count_nonzero())
        num_posinf = int((signed == infinity).count_nonzero()) if num_nan < num_bad else 0
        # Non-finite elements become zero here, and those of the other sign are negative integers, below zero.
        finite = signed * ~nonfinite
        lowest, highest = int((finite ^ sign).max()), int(finite.max())
    if smallest == 0:
        num_zero = int((magnitudes == 0).count_nonzero())
        smallest = int(_magnitudes(magnitudes - 1).min()) + 1  # zero wraps around to the largest
    return num_bad, num_nan, num_posinf, num_zero, smallest, lowest, highest


@plain_torch()  # a transform of torch.func would wrap what is made here
def count_exactly(values: torch.Tensor, *, samples: bool = True) -> tuple[NonfiniteCounts, tuple[float, float] | None]:
    """Count the elements of one strided tensor; also return the finite elements' limits, or None.

    `samples` is False if dimension 0 is not the batch.
    """
    values = unwrap(values)
    infinity, stored = _infinity(values.dtype), _as_integers(as_stored(values)).reshape(-1)
    parts = torch.split(stored, _AT_ONCE) if stored.is_cpu else (stored,)
    columns = list(zip(*(_tally(part, infinity) for part in parts), strict=True))
    num_copies = values.numel() // max(stored.numel(), 1)  # of each number, in an expanded tensor
    num_bad, num_nan, num_posinf, num_zero = (num_copies * sum(column) for column in columns[:4])
    smallest, lowest, highest = min(columns[4]), max(0, *columns[5]), max(0, *columns[6])

    def magnitude(integer: int) -> float:
        return float(torch.full((), integer, dtype=_INTEGERS[values.element_size()]).view(values.dtype))

    num_finite = values.numel() - num_bad
    first, hit = _locate(values, everywhere=not num_finite) if num_bad else (None, ())
    counts = NonfiniteCounts(
        num_nan=num_nan,
        num_posinf=num_posinf,
        num_neginf=num_bad - num_nan - num_posinf,
        num_zero=num_zero,
        smallest=magnitude(smallest) if smallest < infinity else None,
        first_bad_index=first,
        samples=hit if samples else (),
    )
    if not num_finite:
        return counts, None
    least = 0.0 if num_zero else magnitude(smallest)
    return counts, (-magnitude(lowest) or least, magnitude(highest) or 0.0 - least)


@plain_torch()
def find_nonfinite(values: torch.Tensor) -> torch.Tensor:
    """Return the mask of NaN and infinite elements, several times as fast as `~torch.isfinite(values)`."""
    return _magnitudes(_as_integers(values)) >= _infinity(values.dtype)


def _locate(values: torch.Tensor, *, everywhere: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the index of the first non-finite element, and the indices along dimension 0 that hold one."""
    shape = tuple(values.shape)
    if not shape:
        return (), ()
    if everywhere:
        return (0,) * len(shape), tuple(range(min(shape[0], MAX_SAMPLES_LISTED)))
    one_of_each = tuple(slice(None if stride else 1) for stride in values.stride())  # in an expanded tensor
    once = values[one_of_each]
    largest = _magnitudes(_as_integers(once)).reshape(len(once), -1).amax(1).expand(shape[0])
    rows = (largest >= _infinity(values.dtype)).nonzero().flatten().tolist()
    inner = find_largest(find_nonfinite(once[rows[0]]).numpy(force=True))
    return (rows[0], *inner), tuple(rows[:MAX_SAMPLES_LISTED])


def find_largest(values: NDArray[Any]) -> tuple[int, ...]:
    """Return the index of the first largest value; numpy finds it many times as fast as torch."""
    return tuple(int(place) for place in np.unravel_index(values.argmax(), values.shape))


# Types that hold no tensor of the step. A module's weights are read as the model's state.
_WITHOUT_TENSORS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...), enum.Enum, PurePath),
    *(type, types.ModuleType, weakref.ref, np.dtype, np.ndarray, np.generic, np.random.Generator, nn.Module),
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
)
_NUMPY_FLOATS = "efdFD"  # those that torch has as well


def walk_tensors(value: Any, *, attributes: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested containers, numpy arrays and, with `attributes`, what any other object refers to.

    Each comes with its place ("", "[0]", "logit", "hidden[2]"). Generators are not consumed: the model's caller still
    needs them.
    """
    for place, item in walk(value, once(_references) if attributes else parts):
        if isinstance(item, torch.Tensor):
            yield spell(place), item
        elif isinstance(item, np.ndarray) and item.dtype.char in _NUMPY_FLOATS:
            yield spell(place), torch.from_numpy(np.array(item, dtype=item.dtype.newbyteorder("=")))


def list_unread(value: Any) -> tuple[str, ...]:
    """Return the places in `value` that may hold numbers but cannot be read, each with what is there.

    A plain number that is NaN or infinite is one: it may have been a tensor, and no op is known to have made it.
    """
    found = ((spell(place), _describe_unread(item)) for place, item in walk(value, once(_references)))
    return tuple(f"{place} ({what})" if place else what for place, what in found if what)


def _describe_unread(item: Any) -> str:
    """Return what hides the numbers of an item, "" if it can be read or has none."""
    if item is BEYOND:
        return "nested too deeply, or one of too many"
    if isinstance(item, torch.Tensor):
        has_values = format_of(item.dtype) is not None and item.numel() > 0
        return f"a {type(item).__name__}" if has_values and (item.is_meta or numbers_in(item) is None) else ""
    if isinstance(item, (float, np.floating)) and not math.isfinite(item):
        return f"the plain number {item}"
    return "" if isinstance(item, _WITHOUT_TENSORS) or _references(item) is not None else f"a {type(item).__name__}"


def _references(value: Any) -> Parts | None:
    """Return what a value refers to (items, attributes, closures), None if it holds no tensors or hides what it holds.

    No property is run.
    """
    if isinstance(value, _WITHOUT_TENSORS):
        return None
    inside = parts(value)
    if inside is not None:
        return inside
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closed = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
        return {**closed, "defaults": (value.__defaults__, value.__kwdefaults__)}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return {"__self__": value.__self__}
    stored = attributes(value)
    # Without attributes, an iterator or an object of a library's own code may hold numbers all the same.
    of_python = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    is_known = stored or hasattr(value, "__dict__") or (of_python and not isinstance(value, Iterable))
    return stored if is_known else None
