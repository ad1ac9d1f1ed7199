"""Bound a replay's memory: a forecast, a limit on what a dump's arguments ask for, a build without initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.tensors import unexpanded
from nandoctor.errors import ModelError
from nandoctor.machine import available_memory, memory_of
from nandoctor.replaying.module_state import LARGE_NBYTES
from nandoctor.text import byte_size
from nandoctor.torch_compat import TorchDispatchMode, storage_of

# Leaves room for initial values, tied copies and position tables that are not saved.
_TIMES_WEIGHTS = 4
_FLOOR_NBYTES = 512 << 20
_COUNTED_BY_A_NUMBER = frozenset({"arange", "linspace", "logspace", "eye", "randperm"})
_MAX_CALLS = 2_000_000  # a minute of operations, or a hundred thousand layers
_WIDE = 4  # bytes: half-precision products are computed in fp32
_UNFILLED_NBYTES = 1 << 20
_DRAWING = frozenset({"normal_", "uniform_", "kaiming_uniform_"})
_FOLLOWING = frozenset({"mul_", "add_", "clamp_"})


def build_within(make: Callable[[], nn.Module], weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Call `make`, allowing at most a few times the bytes of `weights` for new tensors.

    Raises:
        ModelError: `make` asks for more.
    """
    with _Allowance(memory_of(weights.values())):
        return make()


class _Allowance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that limits the bytes of new tensors; where their size is an argument, before they are allocated."""

    def __init__(self, weights_nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights_nbytes = weights_nbytes
        self._allowed = self._left = _TIMES_WEIGHTS * weights_nbytes + _FLOOR_NBYTES
        self._calls_left = _MAX_CALLS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._calls_left -= 1
        if self._calls_left < 0 or _wanted_nbytes(func, args, kwargs or {}) > self._left:
            raise self._refuse()
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(isinstance(item, torch.Tensor) for item in args):
            self._left -= result.untyped_storage().nbytes() if result.device.type != "meta" else 0
            if self._left < 0:
                raise self._refuse()
        return result

    def _refuse(self) -> ModelError:
        return ModelError(
            f"Building the model with the dump's arguments takes more than {byte_size(self._allowed)}, and the weights "
            f"in the file have {byte_size(self._weights_nbytes)}.",
            remedy="The arguments are not those of these weights; if they are, name what builds the model: --model "
            "FILE.py:NAME.",
        )


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


def _wanted_nbytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the bytes that the arguments of a factory op ask for; 0 for an op that takes tensors."""
    if any(isinstance(item, torch.Tensor) for item in args):
        return 0
    name = func.overloadpacket.__name__
    shapes = (item for item in args if isinstance(item, (list, tuple)))
    sizes = [math.prod(shape) for shape in shapes if all(isinstance(size, int) for size in shape)]
    if name in _COUNTED_BY_A_NUMBER:
        sizes += [abs(int(item)) ** (2 if name == "eye" else 1) for item in args if isinstance(item, (int, float))]
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return max(sizes, default=0) * int(dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The bytes that stay in mapped files, and the least bytes of memory by part.

    Activations are not included: their size shows only when the model runs.
    """

    mapped_nbytes: int
    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """The least memory that the replay takes."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        weights = f", beside {byte_size(self.mapped_nbytes)} of weights in files" if self.mapped_nbytes else ""
        return f"at least {byte_size(self.nbytes)} of memory{weights}"


def forecast(dump: Dump, device: torch.device, *, backward: bool) -> Forecast:
    """Return what the replay of this dump takes on this device, with or without a backward pass.

    A large model's weights stay in the file and are widened one layer at a time; its gradients are freed one by one.
    """
    arrays = (unexpanded(array) if array.layout is torch.strided else array for array in dump.arrays.values())
    weights, batch = memory_of(dump.state.values()), memory_of(arrays)
    floating = [tensor for tensor in dump.state.values() if tensor.is_floating_point()]
    if device.type == "cpu" and weights >= LARGE_NBYTES:
        largest = max((tensor.numel() * _WIDE for tensor in floating), default=0)
        parts = {"the largest layer in fp32": largest, "batch": batch}
        parts |= {"its gradient": largest} if backward else {}
        return Forecast(mapped_nbytes=weights, parts=parts)
    parts = {"weights": weights, "batch": batch, **({"gradients": memory_of(floating)} if backward else {})}
    return Forecast(mapped_nbytes=0, parts=parts)


def require_room(expected: Forecast, device: torch.device, allowed: int | None) -> None:
    """Check that the step fits into the free memory, and into what the user allows.

    Raises:
        ModelError: it does not; the message has the figures.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if allowed is not None and expected.nbytes > allowed:
        room, remedy = f"--memory allows {byte_size(allowed)}", "Allow more, or leave --memory out."
    elif free is not None and expected.nbytes > free:
        room = f"{byte_size(free)} are free on {device.type}"
        remedy = "Run it where there is more memory, or stop other programs there."
    else:
        return
    parts = ", ".join(f"{name} {byte_size(nbytes)}" for name, nbytes in expected.parts.items())
    raise ModelError(
        f"The replay takes at least {byte_size(expected.nbytes)} of memory ({parts}, and the outputs of the layers), "
        f"and {room}. Nothing was built.",
        remedy=remedy,
    )
