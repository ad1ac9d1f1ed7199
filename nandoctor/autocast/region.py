"""`cuda_autocast`: CUDA's autocast on any device, for a training loop of the user's own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from typing import Any

import torch

from nandoctor.autocast.kernels import shared_kernels
from nandoctor.autocast.policy import Policy, apply_policy, exact_products, make_policy
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import FORMATS
from nandoctor.process_wide import Patch, Shared, patched
from nandoctor.text import dtype_name
from nandoctor.torch_places import CHECKPOINT_AUTOCAST


class cuda_autocast(ContextDecorator):  # noqa: N801 - it stands where `torch.autocast` stood
    """CUDA's autocast on any device, as `torch.autocast("cuda", dtype)` is on a GPU.

    One object may be entered many times, inside itself and as a decorator. What `torch.utils.checkpoint` recomputes in
    the backward pass follows CUDA's lists as well, also after the context was left: the kernels stay registered as long
    as a graph is alive that will recompute with them.

    Args:
        dtype: float16 or bfloat16.
        device: the type of the device that the model is on.

    Raises:
        NanDoctorError: a dtype other than float16 and bfloat16.
    """

    def __init__(self, dtype: torch.dtype = torch.float16, device: str = "cpu") -> None:
        name = dtype_name(dtype)
        if name not in FORMATS:
            raise NanDoctorError(
                f"Autocast does not compute in {name}.", remedy="Choose float16 or bfloat16 as its dtype."
            )
        self._policy = make_policy("cuda", FORMATS[name])
        self._device = torch.device(device)
        self._entered = _Entered()

    def __enter__(self) -> None:
        self._entered.regions.append(_open.enter(self._policy, self._device))

    def __exit__(self, *raised: object) -> None:
        _open.leave(self._entered.regions.pop())


class _Entered(threading.local):
    """The regions that this thread has opened by one object and not left yet."""

    def __init__(self) -> None:
        self.regions: list[ExitStack] = []


class _OpenRegions(threading.local):
    """The regions that this thread is in, the innermost last.

    A region restores what was before it. One that is left before those inside it, as begin and end hooks may do, is
    therefore undone only after them; until then this thread stays in it.
    """

    def __init__(self) -> None:
        self._regions: list[ExitStack] = []
        self._left: set[int] = set()

    @property
    def any(self) -> bool:
        """True if this thread is in one."""
        return bool(self._regions)

    def enter(self, policy: Policy, device: torch.device) -> ExitStack:
        with ExitStack() as stack:
            stack.enter_context(_checkpoints)
            stack.enter_context(apply_policy(policy, device))
            self._regions.append(region := stack.pop_all())
        return region

    def leave(self, region: ExitStack) -> None:
        self._left.add(id(region))
        while self._regions and id(self._regions[-1]) in self._left:
            innermost = self._regions.pop()
            self._left.remove(id(innermost))
            innermost.close()


_open = _OpenRegions()


class _Recomputation(dict[str, Any]):
    """What a checkpoint will call `torch.autocast` with; the kernels are there for as long as it is."""

    def __init__(self, arguments: dict[str, Any], device_type: str) -> None:
        super().__init__(arguments)
        held = ExitStack()
        held.enter_context(exact_products(device_type))
        held.enter_context(shared_kernels(device_type))
        weakref.finalize(self, held.close).atexit = False


def _keep_kernels(read: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoints read the autocast state in the forward, and recompute under it in the backward."""

    def read_and_keep(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        device_arguments, cpu_arguments = read(*args, **kwargs)
        return device_arguments, _Recomputation(cpu_arguments, "cpu") if _open.any else cpu_arguments

    return read_and_keep


_checkpoints = Shared(lambda: patched([Patch(CHECKPOINT_AUTOCAST, _keep_kernels)]))
