"""Flags that are computed on a device and read later, so that the host need not wait for the device."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nandoctor.capture.environment import read_rank


class Flag:
    """Numbers on a device, with an asynchronous copy to the host that starts when the flag is made.

    `values` waits for that copy only, not for work queued after it.
    """

    __slots__ = ("_event", "_host", "_values")

    def __init__(self, numbers: torch.Tensor | float) -> None:
        self._event: Any = None
        self._host: torch.Tensor | None = None
        if isinstance(numbers, torch.Tensor) and numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))
        else:
            self._values = _read(numbers)

    @property
    def on_device(self) -> bool:
        """True if reading the flag may wait for the device."""
        return self._event is not None

    @property
    def ready(self) -> bool:
        """True if the flag can be read without waiting."""
        return self._event is None or bool(self._event.query())

    @property
    def nonfinite(self) -> bool:
        """True if the first number, a magnitude, is NaN or infinite."""
        return not math.isfinite(self.values()[0])

    def values(self) -> list[float]:
        """Return the numbers; waits for the copy."""
        if self._host is not None:
            self._event.synchronize()
            self._values, self._host = _read(self._host), None
        return self._values


def _read(numbers: torch.Tensor | float) -> list[float]:
    listed = numbers.detach().flatten().tolist() if isinstance(numbers, torch.Tensor) else [numbers]
    return list(map(float, listed))


def flag_nonfinite(tensors: Iterable[torch.Tensor], device: torch.device, *, ask_all: bool) -> Flag:
    """Return a flag that is 1 if any element of the floating-point or complex tensors is NaN or Inf, else 0.

    With `ask_all` under torch.distributed, the flags of all ranks follow; every rank must ask at the same step.
    """
    found = [_has_nonfinite(values) for values in tensors if values.is_floating_point() or values.is_complex()]
    rank, world_size = read_rank()
    if not ask_all or world_size == 1:
        return Flag(any(found) if {*map(type, found)} <= {bool} else _any(found, device))
    flags = torch.zeros(1 + world_size, device=device)
    flags[0] = flags[1 + rank] = _any(found, device)
    dist.all_reduce(flags[1:], op=dist.ReduceOp.MAX)
    return Flag(flags)


def _has_nonfinite(values: torch.Tensor) -> torch.Tensor | bool:
    """Return True if any element is NaN or Inf: a bool for one number on a CPU, which is faster, else a tensor."""
    if values.numel() != 1 or values.layout is not torch.strided:
        return ~torch.isfinite(values).all()
    if values.device.type == "cpu":
        return not cmath.isfinite(values.item())
    return (values.detach() * 0 != 0).squeeze()


def _any(found: Sequence[torch.Tensor | bool], device: torch.device) -> torch.Tensor:
    flags = [torch.as_tensor(flag, device=device) for flag in found or [False]]
    return flags[0] if len(flags) == 1 else torch.stack(flags).any()


def flag_magnitude(magnitude: torch.Tensor | float | None, device: torch.device, *, ask_all: bool) -> Flag | None:
    """Return a magnitude as a flag, None if there is none.

    With `ask_all` under torch.distributed it is the largest on any rank, inf for NaN; every rank must ask.
    """
    if ask_all and read_rank()[1] > 1:
        local = torch.as_tensor(0.0 if magnitude is None else magnitude, dtype=torch.float32, device=device)
        magnitude = local.nan_to_num(math.inf, math.inf)  # MAX is undefined for NaN
        dist.all_reduce(magnitude, op=dist.ReduceOp.MAX)
    return None if magnitude is None else Flag(magnitude)
