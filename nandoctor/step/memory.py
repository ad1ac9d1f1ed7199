"""Bound the memory of a model: a limit for what dumps describe, and a build without initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from nandoctor.errors import ModelError
from nandoctor.machine import bounded_memory, is_out_of_memory, memory_of, private_memory
from nandoctor.process_wide import is_forked
from nandoctor.text import byte_size
from nandoctor.torch_compat import storage_of

# Leaves room for initial values, tied copies and position tables that are not saved.
_TIMES_WEIGHTS = 4
_FLOOR_NBYTES = 512 << 20
_UNFILLED_NBYTES = 1 << 20
_DRAWING = frozenset({"normal_", "uniform_", "kaiming_uniform_"})
_FOLLOWING = frozenset({"mul_", "add_", "clamp_"})


@contextmanager
def building_within(weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Allow a model that is built from a dump's arguments a few times the bytes of its weights, where Linux can.

    Raises:
        ModelError: it takes more.
    """
    nbytes, taken = memory_of(weights.values()), memory_with_threads()
    allowed = _TIMES_WEIGHTS * nbytes + _FLOOR_NBYTES
    try:
        with bounded_memory(None if taken is None else taken + allowed):
            yield
    except ModelError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"Building the model with the dump's arguments takes more than {byte_size(allowed)}, and the weights "
            f"in the file have {byte_size(nbytes)}.",
            remedy="The arguments are not those of these weights; if they are, name what builds the model: --model "
            "FILE.py:NAME.",
        ) from error


def memory_with_threads() -> int | None:
    """Return `private_memory` with torch's threads started: libgomp aborts if the limit is too low for their stacks."""
    if not is_forked():
        torch.ones(1 << 16).sum()  # large enough to run on all threads
    return private_memory()


class Unfilled(TorchFunctionMode):
    """A mode for building a large model: random initialisers return a weight as it was allocated.

    Memory that was never written takes no space. What the dump's weights do not replace is drawn by `fill`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: set[int] = set()
        self._left_out: dict[int, list[Callable[[], Any]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        target: Any = args[0] if args else kwargs.get("tensor")
        if isinstance(target, nn.Parameter) and _is_large(target):
            self._weights.add(storage_of(target))  # also reached by `weight.data`
        # Other tensors are drawn: torch.nn.init.trunc_normal_ draws until all values are within its bounds.
        if name in _DRAWING and _is_large(target) and storage_of(target) in self._weights:
            self._left_out[storage_of(target)] = []  # what was to be in it before
        elif name not in _FOLLOWING or not self.holds(target):
            return func(*args, **kwargs)
        self._left_out[storage_of(target)].append(partial(func, *args, **kwargs))
        return target

    def holds(self, tensor: Any) -> bool:
        """Return True if the tensor was left as it was allocated."""
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not is_lazy(tensor)
        return is_plain and storage_of(tensor) in self._left_out

    @torch.no_grad()
    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Draw the initial values of those of these tensors that have none."""
        for tensor in tensors:
            if self.holds(tensor):
                for draw in self._left_out.pop(storage_of(tensor)):
                    draw()
        self._left_out.clear()


def _is_large(tensor: Any) -> bool:
    is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not is_lazy(tensor)
    return is_plain and tensor.device.type == "cpu" and memory_of([tensor]) >= _UNFILLED_NBYTES
