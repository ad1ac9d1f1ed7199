"""Tensors in memory that is backed by a file, and so can be written back to the disk, unlike a process's own memory."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nandoctor.machine import memory_of
from nandoctor.process_wide import PerThread, held

_LEAST_NBYTES = 1 << 20
_graph = PerThread(in_files=False)


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
    if tensor.dtype == dtype or not (is_large_tensor(tensor.detach()) and tensor.is_contiguous()):
        return tensor.to(dtype)
    return map_empty(tensor.shape, dtype).copy_(tensor)


@contextmanager
def kept_in_files(wanted: bool) -> Iterator[None]:
    """Keep in files the large tensors that the graph saves for the backward pass, and casts of weights."""
    if not wanted:
        yield
        return
    with held((_graph, "in_files", True)), torch.autograd.graph.saved_tensors_hooks(_pack, lambda saved: saved):
        yield


def move_to_file(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its graph, moved into a file if that is wanted and it is large."""
    if _graph.in_files and is_large_tensor(tensor):
        with torch.no_grad():
            tensor.data = map_empty(tensor.shape, tensor.dtype).copy_(tensor)
    return tensor


def _pack(tensor: torch.Tensor) -> Any:
    if tensor.is_leaf or not is_large_tensor(tensor):
        return tensor
    with torch.no_grad():
        return map_empty(tensor.shape, tensor.dtype).copy_(tensor)


def is_large_tensor(tensor: Any) -> bool:
    """Return True for a plain tensor or weight on the CPU, of a megabyte or more."""
    is_dense = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_dense and tensor.device.type == "cpu" and memory_of([tensor]) >= _LEAST_NBYTES
