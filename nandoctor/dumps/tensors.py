"""Makes tensors of what is stored in a file, or in those of all ranks, and reads the numbers of odd ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nandoctor.dumps.recorded_format import get
from nandoctor.dumps.stored_tensor import StoredSparse, is_dense
from nandoctor.errors import DumpError
from nandoctor.text import brief
from nandoctor.torch_compat import sparse_values


def to_torch(stored: Any) -> torch.Tensor:
    """Return the tensor without gradient and hooks; its numbers stay where they are in the file.

    Raises RuntimeError if a sparse tensor has an index out of bounds.
    """
    if isinstance(stored, torch.Tensor):
        return stored.detach()
    if isinstance(stored, StoredSparse):
        return _to_sparse(stored)
    raw, dtype = stored.raw, getattr(torch, stored.dtype.name.removeprefix("torch."))
    if raw.ctypes.data % raw.itemsize:  # torch's kernels need an element at a multiple of its size
        raw = raw.copy(order="K")
    if raw.dtype.kind == "c":
        return torch.from_numpy(raw)
    return torch.from_numpy(raw.view(f"i{raw.itemsize}")).view(dtype)  # numpy has no bf16, and torch lacks some of its


def _to_sparse(stored: StoredSparse) -> torch.Tensor:
    """Return a sparse tensor with its indices in bounds: torch checks them if asked, and kernels use them."""
    layout, parts = getattr(torch, stored.layout.removeprefix("torch.")), map(to_torch, stored.parts)
    size, *coalesced = stored.others
    if layout is torch.sparse_coo:
        make: Any = partial(torch.sparse_coo_tensor, is_coalesced=coalesced[0] if coalesced else None)
    else:
        make = partial(torch.sparse_compressed_tensor, layout=layout)
    tensor: torch.Tensor = make(*parts, size, check_invariants=True)
    return tensor


def comparable_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored numbers in a dtype that torch can compare: those of a sparse tensor, a complex one as two."""
    values = tensor if tensor.layout is torch.strided else sparse_values(tensor)
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj())
    is_fp8 = values.is_floating_point() and values.element_size() == 1
    return values.float() if is_fp8 else values  # fp8 has storage and casts, but hardly any other kernels


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a strided tensor, once each and in memory order, for a reduction.

    In another order, as of convolutions in channels_last and of attention's transposed heads, it takes up to 20 times
    as long; an expanded tensor would be materialised.
    """
    if values.is_contiguous():
        return values
    stored = values[tuple(slice(None if stride else 1) for stride in values.stride())]
    return stored.permute(sorted(range(stored.dim()), key=stored.stride().__getitem__, reverse=True))


def holds_finite(values: torch.Tensor) -> bool:
    """Return True if real numbers are all finite: one pass, where `torch.isfinite` takes ten times as long."""
    if values.numel() == 0:
        return True
    return all(math.isfinite(limit) for limit in torch.aminmax(as_stored(values)))


def count_nonfinite(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return how many elements are NaN, +inf and -inf; a complex number counts as its two parts."""
    values = comparable_values(tensor.detach())
    if not values.is_floating_point() or holds_finite(values):
        return 0, 0, 0
    return int(values.isnan().sum()), int(values.isposinf().sum()), int(values.isneginf().sum())


_TAKE_ALL = "Put the files of all ranks of one step into one folder, as the recorder wrote them."
_MAX_RANKS = 1 << 16
_SAME_STEP = ("step", "micro_batch", "epoch", "world_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The shape of a whole weight, and the indices of the first element of this rank's part in it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def join_shards(
    saved: Mapping[str, Any], path: Path, load: Callable[[Path], Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """Return every sharded weight joined; `load` reads the file of another rank, in the same folder.

    Raises DumpError if a rank's file is missing or of another step, or the parts do not make up the weight.
    """
    shapes = {name: shard.shape for name, shard in get(saved, "shards", Mapping[str, Shard], {}).items()}
    parts: dict[str, dict[tuple[int, ...], Any]] = {name: {} for name in shapes}
    for contents, file in _files_of_ranks(saved, path, load):
        state, nbytes_left = get(contents, "state_dict", Mapping[str, Any], {}), file.stat().st_size
        for name, shard in get(contents, "shards", Mapping[str, Shard], {}).items():
            part = state.get(name)
            if name not in parts or not is_dense(part) or not part.numel():
                continue
            nbytes_left -= part.nbytes  # joining copies the parts, so they may claim what the file has
            if nbytes_left < 0:
                raise DumpError(f"{brief(file.name)} claims more weights than it holds.", remedy=_TAKE_ALL)
            parts[name].setdefault(shard.offset, part)
    for name, shape in shapes.items():
        if sum(part.numel() for part in parts[name].values()) != math.prod(shape):
            raise DumpError(
                f"it holds only a part of the weights, and the files beside it have not all of {brief(name)}.",
                remedy=_TAKE_ALL,
            )
    return {name: _join(name, shape, parts[name]) for name, shape in shapes.items()}


def _files_of_ranks(
    saved: Mapping[str, Any], path: Path, load: Callable[[Path], Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """Yield what the ranks recorded of the step, with its file: first what was read already, then the others."""
    yield saved, path
    event = get(saved, "event", Mapping[str, Any], {})
    own = get(event, "rank", int, 0)
    for rank in range(min(get(event, "world_size", int, 1), _MAX_RANKS)):
        file = path.with_name(path.name.replace(f"-rank{own}", f"-rank{rank}"))
        if file == path or not file.is_file():
            continue
        contents = load(file)
        other = get(contents, "event", Mapping[str, Any], {})
        if any(other.get(name) != event.get(name) for name in _SAME_STEP):
            raise DumpError(f"{brief(file.name)} beside it is of another step.", remedy=_TAKE_ALL)
        yield contents, file


def _join(name: str, shape: tuple[int, ...], parts: Mapping[tuple[int, ...], Any]) -> torch.Tensor:
    tensors = {offset: to_torch(part) for offset, part in parts.items()}
    try:
        whole = torch.zeros(shape, dtype=next(iter(tensors.values())).dtype if tensors else None)
        for offset, tensor in tensors.items():
            ends = [begin + size for begin, size in zip(offset, tensor.shape, strict=True)]
            whole[tuple(map(slice, offset, ends))] = tensor
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise DumpError(
            f"the ranks' parts of {brief(name)} cannot be joined ({type(error).__name__}).", remedy=_TAKE_ALL
        ) from error
    return whole
