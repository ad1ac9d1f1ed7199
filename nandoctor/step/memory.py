"""Build a large model without initial values, which a dump replaces."""

from __future__ import annotations

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
    """A mode for building a large model whose weights all come from a dump: initialisers draw no weight.

    Memory that was never written takes no space.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: set[int] = set()
        self._undrawn: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        target: Any = args[0] if args else kwargs.get("tensor")
        if isinstance(target, nn.Parameter) and _is_large(target):
            self._weights.add(storage_of(target))  # also reached by `weight.data`
        # Other tensors are drawn: torch.nn.init.trunc_normal_ draws until all values are within its bounds.
        if name in _DRAWING and _is_large(target) and storage_of(target) in self._weights:
            self._undrawn.add(storage_of(target))
            return target
        return target if name in _FOLLOWING and self.holds(target) else func(*args, **kwargs)

    def holds(self, tensor: Any) -> bool:
        """Return True if the tensor was left as it was allocated."""
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not is_lazy(tensor)
        return is_plain and storage_of(tensor) in self._undrawn


def _is_large(tensor: Any) -> bool:
    is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not is_lazy(tensor)
    return is_plain and tensor.device.type == "cpu" and memory_of([tensor]) >= _UNFILLED_NBYTES
