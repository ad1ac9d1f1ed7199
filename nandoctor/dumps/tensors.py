"""Makes tensors of what is stored in a file, and reads the numbers of those that are not a plain block of them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from nandoctor.dumps.stored_tensor import StoredSparse
from nandoctor.torch_compat import sparse_values


def to_torch(stored: Any) -> torch.Tensor:
    """Return the tensor without gradient and hooks; its numbers stay where they are in the file.

    Raises:
        RuntimeError: a sparse tensor has an index out of bounds.
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
        is_coalesced = coalesced[0] if coalesced else None
        make: Any = partial(torch.sparse_coo_tensor, is_coalesced=is_coalesced)
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


def unexpanded(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a strided tensor, with one place in each dimension that repeats them."""
    return values[tuple(slice(None if stride else 1) for stride in values.stride())] if 0 in values.stride() else values


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a strided tensor, once each and in memory order, for a reduction.

    In another order, as of convolutions in channels_last and of attention's transposed heads, it takes up to 20 times
    as long; an expanded tensor would be materialised.
    """
    if values.is_contiguous():
        return values
    stored = unexpanded(values)
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
