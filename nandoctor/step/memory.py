"""Build a large model without initial values, which a dump replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from nandoctor.machine import memory_of
from nandoctor.torch_compat import storage_of

_UNFILLED_NBYTES = 1 << 20
_DRAWING = frozenset({"normal_", "uniform_", "kaiming_uniform_"})
_FOLLOWING = frozenset({"mul_", "add_", "clamp_"})


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
