"""Memory: what the arguments in a file may ask for, and how its end is told.

In: what builds a model, and the weights that the file has for it; or an exception. Out: the model, or an error before
memory is filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nandoctor.errors import ModelError
from nandoctor.machine import memory_of
from nandoctor.text import byte_size
from nandoctor.torch_compat import TorchDispatchMode

# Initial values, tied copies and tables of positions that are not saved.
_TIMES_WEIGHTS = 4
_FLOOR_NBYTES = 512 << 20
_COUNTED_BY_A_NUMBER = frozenset({"arange", "linspace", "logspace", "eye", "randperm"})
_MAX_CALLS = 2_000_000  # operations of a minute: a hundred thousand layers


def build_within(make: Callable[[], nn.Module], weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Call `make`, with at most a few times the bytes of `weights` for new tensors.

    Raises:
        ModelError: it asks for more.
    """
    nbytes = memory_of(weights.values())
    with _Allowance(_TIMES_WEIGHTS * nbytes + _FLOOR_NBYTES, weights_nbytes=nbytes):
        return make()


class _Allowance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new tensors: before they are filled, where their size is an argument."""

    def __init__(self, nbytes: int, *, weights_nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowed = self._left = nbytes
        self._weights_nbytes = weights_nbytes
        self._calls_left = _MAX_CALLS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation if what it makes is still allowed."""
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


def _wanted_nbytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """What a factory of tensors is about to make, as its arguments say it; 0 for what takes tensors."""
    if any(isinstance(item, torch.Tensor) for item in args):
        return 0
    name = func.overloadpacket.__name__
    sizes = [math.prod(item) for item in args if isinstance(item, (list, tuple)) and all(map(_is_int, item))]
    if name in _COUNTED_BY_A_NUMBER:
        sizes += [abs(int(item)) ** (2 if name == "eye" else 1) for item in args if isinstance(item, (int, float))]
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return max(sizes, default=0) * int(dtype.itemsize)


def _is_int(item: object) -> bool:
    return isinstance(item, int)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether memory ran out, on the CPU or a GPU, in this exception or one that it came from."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        # What the CPU's allocator raises, in c10/core/impl/alloc_cpu.cpp, has no class of its own.
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False
