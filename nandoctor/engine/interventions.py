"""Applies edits to a run, and undoes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from nandoctor.autocast.literals import FP32_FOR_HALF
from nandoctor.autocast.policy import EXACT, REFERENCE
from nandoctor.changes.batch import KeepSamples
from nandoctor.changes.constant import SetAttribute
from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.changes.setting import SetLossScale, UseFormat
from nandoctor.engine.call import Call
from nandoctor.engine.module_state import is_large, widen_tensors
from nandoctor.engine.op_edits import OpEdits, widen
from nandoctor.engine.starting_state import Mode
from nandoctor.evidence.edits import SingleEdit
from nandoctor.evidence.trace import LOSS, Place
from nandoctor.tracing.dispatch_hook import intercepting

_UNLOWERED = {policy.format.name: policy for policy in (REFERENCE, EXACT)}


def choose_mode(edits: Sequence[SingleEdit], mode: Mode) -> Mode:
    """Return the mode with the precision and the loss scale that the edits ask for."""
    policy = mode.policy
    for edit in edits:
        if isinstance(edit, UseFormat):
            policy = _UNLOWERED.get(edit.format.name) or replace(policy, format=edit.format, ambient=True)
    scale = next((edit.value for edit in edits if isinstance(edit, SetLossScale)), mode.loss_scale)
    return replace(mode, policy=policy, loss_scale=scale)


def select_samples(edits: Sequence[SingleEdit], call: Call) -> Call:
    """Return the call with the samples that the edits keep."""
    kept = next((edit.samples for edit in edits if isinstance(edit, KeepSamples)), None)
    return call if kept is None else call.on_samples(kept)


@contextmanager
def intervene(
    edits: Sequence[SingleEdit], model: nn.Module, device: torch.device, owner: Callable[[], Place]
) -> Iterator[None]:
    """Apply the edits to modules and ops while the context is open; `owner` returns the running module call.

    What they change in the model, `restored` puts back.
    """
    for edit in (edit for edit in edits if isinstance(edit, SetAttribute)):
        owners = [module for module in model.modules() if type(module).__name__ == edit.type]
        for module in (module for module in owners if getattr(module, edit.name, None) == edit.was):
            setattr(module, edit.name, edit.value)
    kept = {edit.module: edit.children for edit in edits if isinstance(edit, KeepModule) and edit.module != LOSS}
    changes = OpEdits(edits, owner)
    with (
        _modules_kept(kept, model, device) if kept else nullcontext(),
        intercepting(changes.handle) if changes.changes else nullcontext(),
    ):
        yield


@contextmanager
def loss_in_fp32(edits: Sequence[SingleEdit], device: torch.device) -> Iterator[Callable[[Any], Any]]:
    """Open a context for the loss function, and yield a function that prepares the output for it."""
    if not any(isinstance(edit, KeepModule) and edit.module == LOSS for edit in edits):
        yield lambda output: output
        return
    with torch.autocast(device.type, enabled=False):
        yield widen


@contextmanager
def _modules_kept(kept: Mapping[str, bool], model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch autocast off by hooks around the modules in `kept`, and on again around children that are not kept."""
    modules = dict(model.named_modules())
    kept = {path: children for path, children in kept.items() if path in modules}  # others are built in the forward
    modes = {id(modules[path]): children for path, children in kept.items()}
    regions, in_files = _Regions(modes, device), is_large(model)
    for path, children in kept.items():
        own = (*modules[path].parameters(recurse=children), *modules[path].buffers(recurse=children))
        # With autocast off, low-precision weights would not fit fp32 inputs.
        widen_tensors(own, FP32_FOR_HALF, in_files=in_files)
    with ExitStack() as stack:
        for module in model.modules():
            pre = nn.Module.register_forward_pre_hook(module, regions.enter, with_kwargs=True, prepend=True)
            stack.callback(pre.remove)
            stack.callback(nn.Module.register_forward_hook(module, regions.leave, always_call=True).remove)
        stack.callback(regions.close)
        yield


class _OpenCall(NamedTuple):
    """An open module call: the region made for it, empty if none is needed, and autocast's state without that region.

    `depth` is how many regions were open when its forward began: if there are more, the model opened one itself.
    """

    module: nn.Module
    region: AbstractContextManager[Any]
    state: tuple[bool, torch.dtype]
    depth: int


class _Regions:
    """The autocast regions around the open module calls; `modes` has the ids of the modules in fp32.

    True means a module with all below it, False its forward alone, which gets its children's output in fp32.
    """

    def __init__(self, modes: Mapping[int, bool], device: torch.device) -> None:
        self._modes = modes
        self._device = device
        self._open: list[_OpenCall] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        name = self._device.type
        state = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
        region: AbstractContextManager[Any] = nullcontext()
        if self._is_in_kept_forward() and self._open[-1].depth == _autocast_depth():
            state = self._open[-1].state
            region = torch.autocast(name, dtype=state[1], enabled=state[0])
        if id(module) in self._modes:
            region = torch.autocast(name, enabled=False)
        region.__enter__()
        self._open.append(_OpenCall(module=module, region=region, state=state, depth=_autocast_depth()))
        return widen((args, kwargs)) if id(module) in self._modes else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._open or self._open[-1].module is not module:
            return None
        self._open.pop().region.__exit__(None, None, None)
        return widen(output) if self._is_in_kept_forward() else None

    def _is_in_kept_forward(self) -> bool:
        """Return True if the innermost open call is of a module whose forward alone is in fp32."""
        return bool(self._open) and self._modes.get(id(self._open[-1].module)) is False

    def close(self) -> None:
        while self._open:
            self._open.pop().region.__exit__(None, None, None)


def _autocast_depth() -> int:
    """Return how many autocast regions are open in this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
