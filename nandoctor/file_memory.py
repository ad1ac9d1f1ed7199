"""Tensors in memory that is backed by a file, and so can be written back to the disk, unlike a process's own memory."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence

import torch

_LEAST_NBYTES = 1 << 20


def map_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros; a large one lies in an unnamed file that is gone with the tensor."""
    numel = math.prod(shape)
    if numel * dtype.itemsize < _LEAST_NBYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="nandoctor-") as file:
        file.truncate(numel * dtype.itemsize)
        flat = torch.from_file(file.name, shared=True, size=numel, dtype=dtype)
    return flat.view(tuple(shape))


def cast_to_file(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in another format, in a file if it is large; in memory if it is not plain or contiguous.

    The layout stays, since a kernel may sum in another order for another layout.
    """
    plain = type(tensor.detach()) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if tensor.dtype == dtype or not (plain and tensor.is_contiguous()):
        return tensor.to(dtype)
    return map_empty(tensor.shape, dtype).copy_(tensor)
