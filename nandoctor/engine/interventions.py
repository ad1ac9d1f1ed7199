"""Applies edits to a run, and undoes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from nandoctor.autocast.policy import EXACT, LOW_DTYPES, REFERENCE, Policy
from nandoctor.changes.batch import KeepSamples
from nandoctor.changes.constant import SetAttribute
from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.changes.setting import SetLossScale, UseFormat
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.engine.module_state import is_large, state_in
from nandoctor.engine.op_edits import OpEdits, widen
from nandoctor.evidence.edits import SingleEdit
from nandoctor.evidence.trace import LOSS
from nandoctor.process_wide import held
from nandoctor.tracing.dispatch_hook import intercepting
from nandoctor.tracing.module_tracer import Owner

_UNLOWERED = {policy.format.name: policy for policy in (REFERENCE, EXACT)}


def choose_policy(edits: Sequence[SingleEdit], policy: Policy) -> Policy:
    """Return the policy that the edits ask for."""
    for edit in edits:
        if isinstance(edit, UseFormat):
            policy = _UNLOWERED.get(edit.format.name) or replace(policy, format=edit.format, ambient=True)
    return policy


def choose_loss_scale(edits: Sequence[SingleEdit], loss_scale: float | None) -> float | None:
    """Return the loss scale that the edits ask for."""
    return next((edit.value for edit in edits if isinstance(edit, SetLossScale)), loss_scale)


def select_samples(
    edits: Sequence[SingleEdit], batch: Mapping[str, torch.Tensor], used: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Return the batch with the samples that the edits keep, in every array as long as those that the model takes."""
    kept = next((edit.samples for edit in edits if isinstance(edit, KeepSamples)), None)
    if kept is None:
        return dict(batch)
    size = batch_size(batch, used)
    index = torch.tensor(kept, dtype=torch.long)
    return {
        name: tensor[index.to(tensor.device)] if is_dense(tensor) and tensor.shape[:1] == (size,) else tensor
        for name, tensor in batch.items()
    }


_LISTED = re.compile(r"\.\d+\.")


def batch_size(batch: Mapping[str, torch.Tensor], used: frozenset[str]) -> int | None:
    """Return the number of samples: the most frequent length of the arrays that the model takes, or of all."""
    taken = {name: tensor for name, tensor in batch.items() if name in used} or batch
    lengths = Counter(tensor.shape[0] for tensor in _of_all_samples(taken) if tensor.dim())
    return lengths.most_common(1)[0][0] if lengths else None


def _of_all_samples(batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the arrays except those in a list of dicts (`labels.1.boxes`), which are one sample's, if any remain."""
    others = [tensor for name, tensor in batch.items() if not _LISTED.search(name)]
    return others or list(batch.values())


def sample_count(batch: Mapping[str, torch.Tensor], used: frozenset[str]) -> int | None:
    """Return `batch_size`, or None if as many arrays have another length, or arrays list the edges of a graph.

    Edges are two rows of integers, from and to, or a sparse tensor.
    """
    size = batch_size(batch, used)
    taken = _of_all_samples({name: tensor for name, tensor in batch.items() if name in used and tensor.dim()})
    others = Counter(tensor.shape[0] for tensor in taken if tensor.shape[0] != size)
    as_many = max(others.values(), default=0) >= sum(tensor.shape[0] == size for tensor in taken) > 0
    tables = (tensor for tensor in taken if tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32))
    has_edges = any(table.shape[0] == 2 != size for table in tables)
    return None if as_many or has_edges or not all(map(is_dense, taken)) else size


def may_have_time_first(
    batch: Mapping[str, torch.Tensor], used: frozenset[str]
) -> Literal["never", "unlikely", "possible"]:
    """Return how likely dimension 0, which `sample_count` counts, is time: it may be if sequences have that length.

    It is unlikely beside an array of as many rows that is no sequence, such as a target, and for token ids.
    """
    size = sample_count(batch, used)
    arrays = [tensor for tensor in batch.values() if tensor.dim() and tensor.shape[0] == size]
    sequences = {tensor.shape[:2] for tensor in arrays if tensor.dim() in (3, 5)}
    if not sequences:
        return "unlikely" if any(tensor.dim() == 2 and not tensor.is_floating_point() for tensor in arrays) else "never"
    others = [tensor.shape for tensor in arrays if tensor.dim() in (1, 2, 4)]
    is_alone = all(shape[:2] in sequences or shape == (size, size) for shape in others)
    return "possible" if is_alone else "unlikely"


@contextmanager
def intervene(
    edits: Sequence[SingleEdit], model: nn.Module, device: torch.device, owner: Callable[[], Owner]
) -> Iterator[None]:
    """Apply the edits to modules and ops while the context is open; `owner` returns the running module call."""
    with ExitStack() as stack:
        for edit in edits:
            if isinstance(edit, SetAttribute):
                owners = [module for module in model.modules() if type(module).__name__ == edit.type]
                found = [module for module in owners if getattr(module, edit.name, None) == edit.was]
                stack.enter_context(held(*((module, edit.name, edit.value) for module in found)))
        kept = {edit.module: edit.children for edit in edits if isinstance(edit, KeepModule) and edit.module != LOSS}
        if kept:
            stack.enter_context(_modules_kept(kept, model, device))
        changes = OpEdits(edits, owner)
        if changes.asked_for:
            stack.enter_context(intercepting(changes.handle))
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
    with ExitStack() as stack:
        for path, children in kept.items():
            module = modules[path]
            own = [*module.parameters(recurse=children), *module.buffers(recurse=children)]
            # With autocast off, low-precision weights would not fit fp32 inputs.
            narrow = [(tensor, torch.float32) for tensor in own if tensor.dtype in LOW_DTYPES]
            stack.enter_context(state_in(narrow, in_files=in_files))
        for module in model.modules():
            pre = nn.Module.register_forward_pre_hook(module, regions.enter, with_kwargs=True, prepend=True)
            stack.callback(pre.remove)
            stack.callback(nn.Module.register_forward_hook(module, regions.leave, always_call=True).remove)
        stack.callback(regions.close)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenCall:
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
