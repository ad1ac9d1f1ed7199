"""Flags that are computed on a device and read later, without making the device wait."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from nandoctor.capture.environment import read_rank


class Flag:
    """A number on a device, on its way to the host since it was made.

    `values` waits for the copy alone, not for what the device was given to do after it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        self._host = tensor.detach()
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def on_device(self) -> bool:
        """True if reading it may have to wait."""
        return self._event is not None

    @property
    def ready(self) -> bool:
        """True if reading it does not wait."""
        return not self.on_device or (self._event is not None and bool(self._event.query()))

    @property
    def nonfinite(self) -> bool:
        """True if the number itself, a magnitude, is NaN or infinite."""
        return not math.isfinite(self.values()[0])

    def values(self) -> list[float]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        return [float(item) for item in self._host.flatten().tolist()]


def any_nonfinite(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """One bool on the device: True if any element of the floating-point tensors is NaN or Inf; None without any."""
    found = [~torch.isfinite(values).all() for values in tensors if values.is_floating_point() or values.is_complex()]
    if not found:
        return None
    device = found[0].device
    return found[0] if len(found) == 1 else torch.stack([flag.to(device) for flag in found]).any()


def reduce_over_ranks(local: torch.Tensor, *, ask_all: bool = True) -> torch.Tensor:
    """[the flag of this rank, that of rank 0, of rank 1, ...]; to ask all, every rank must do so at the same step."""
    rank, world_size = read_rank()
    if not ask_all or world_size == 1:
        return local
    flags = torch.zeros(1 + world_size, device=local.device)
    flags[0] = flags[1 + rank] = local
    dist.all_reduce(flags[1:], op=dist.ReduceOp.MAX)
    return flags


def largest_over_ranks(local: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The largest magnitude on any rank, inf for NaN, which no maximum over ranks is defined for; all have to ask."""
    if read_rank()[1] == 1:
        return local
    found = torch.zeros((), device=device) if local is None else local.float().nan_to_num(math.inf, math.inf)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found
