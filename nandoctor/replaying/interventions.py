"""Makes edits to a run, and undoes them.

In: `Edit`s and what they change: a model, a batch, a policy, the ops of a thread. Out: contexts, and changed copies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nandoctor.autocast.policy import EXACT, REFERENCE, Policy
from nandoctor.evidence.edits import (
    ClampArgument,
    Edit,
    KeepModule,
    KeepOp,
    KeepSamples,
    OpSite,
    ResetBuffers,
    ScaleFirst,
    SetArgument,
    SetAttribute,
    SetLossScale,
    SingleEdit,
    StableLog,
    Together,
    UnmaskRows,
    UseFormat,
)
from nandoctor.evidence.trace import LOSS, SourceLine
from nandoctor.torch_compat import schema_of, tree_leaves, tree_map, without_autocast
from nandoctor.tracing.dispatch_hook import Proceed, find_place, intercepting, to_source
from nandoctor.tracing.module_tracer import Owner
from nandoctor.tracing.op_call import Invocation
from nandoctor.tracing.tensor_stats import format_of

_UNLOWERED = {policy.format.name: policy for policy in (REFERENCE, EXACT)}
LOW = (torch.float16, torch.bfloat16)
_CLOSE = 1e-6


def flatten(edits: Iterable[Edit]) -> tuple[SingleEdit, ...]:
    """The edits one by one."""
    return tuple(single for edit in edits for single in (edit.edits if isinstance(edit, Together) else (edit,)))


def choose_policy(edits: Sequence[SingleEdit], policy: Policy) -> Policy:
    """The policy that the edits ask for."""
    for edit in edits:
        if isinstance(edit, UseFormat):
            policy = _UNLOWERED.get(edit.format.name) or replace(policy, format=edit.format)
    return policy


def choose_loss_scale(edits: Sequence[SingleEdit], loss_scale: float) -> float:
    """The loss scale that the edits ask for."""
    return next((edit.value for edit in edits if isinstance(edit, SetLossScale)), loss_scale)


def select_samples(
    edits: Sequence[SingleEdit], batch: Mapping[str, torch.Tensor], used: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The batch with the samples that the edits keep: every array that is as long as those the model takes."""
    kept = next((edit.samples for edit in edits if isinstance(edit, KeepSamples)), None)
    if kept is None:
        return dict(batch)
    size = batch_size(batch, used)
    index = torch.tensor(kept, dtype=torch.long)
    return {
        name: tensor[index.to(tensor.device)] if tensor.dim() and tensor.shape[0] == size else tensor
        for name, tensor in batch.items()
    }


def batch_size(batch: Mapping[str, torch.Tensor], used: frozenset[str]) -> int | None:
    """How many samples there are: the length that most of the arrays have which the model takes, or of all."""
    taken = [tensor for name, tensor in batch.items() if name in used] or list(batch.values())
    lengths = Counter(tensor.shape[0] for tensor in taken if tensor.dim())
    return lengths.most_common(1)[0][0] if lengths else None


@contextmanager
def intervene(
    edits: Sequence[SingleEdit], model: nn.Module, device: torch.device, owner: Callable[[], Owner]
) -> Iterator[None]:
    """A context in which the edits to modules, buffers and ops are made; `owner` tells which module call runs."""
    with ExitStack() as stack:
        for edit in edits:
            if isinstance(edit, SetAttribute):
                stack.enter_context(_attribute_set(edit, model))
            elif isinstance(edit, ResetBuffers):
                _reset(edit, model)  # the run puts every buffer back by itself
        kept = {edit.module: edit.children for edit in edits if isinstance(edit, KeepModule) and edit.module != LOSS}
        if kept:
            stack.enter_context(_modules_kept(kept, model, device))
        changes = _OpChanges(edits, owner)
        if changes.asked_for:
            stack.enter_context(intercepting(changes.handle))
        yield


@contextmanager
def loss_in_fp32(edits: Sequence[SingleEdit], device: torch.device) -> Iterator[Callable[[Any], Any]]:
    """A context for the loss function; what it yields makes the output that the loss function gets."""
    if not any(isinstance(edit, KeepModule) and edit.module == LOSS for edit in edits):
        yield lambda output: output
        return
    with torch.autocast(device.type, enabled=False):
        yield _widen


def _widen(value: Any) -> Any:
    """Low-precision tensors in fp32, wherever in the value they are."""
    return tree_map(lambda leaf: leaf.float() if _is_low(leaf) else leaf, value)


def _is_low(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in LOW


@contextmanager
def _attribute_set(edit: SetAttribute, model: nn.Module) -> Iterator[None]:
    owners = [module for module in model.modules() if type(module).__name__ == edit.type]
    found = [module for module in owners if getattr(module, edit.name, None) == edit.was]
    for module in found:
        setattr(module, edit.name, edit.value)
    try:
        yield
    finally:
        for module in found:
            setattr(module, edit.name, edit.was)


def _reset(edit: ResetBuffers, model: nn.Module) -> None:
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name in edit.names:
            if name in buffers:
                buffers[name].fill_(1.0 if "var" in name.rpartition(".")[2] else 0.0)


@contextmanager
def _modules_kept(kept: Mapping[str, bool], model: nn.Module, device: torch.device) -> Iterator[None]:
    """Hooks that switch autocast off around modules of `kept`, and on again around children that are not to be."""
    modes = {id(model.get_submodule(path)): children for path, children in kept.items()}
    regions = _Regions(modes, device)
    with ExitStack() as stack:
        for path, children in kept.items():
            module = model.get_submodule(path)
            own = [*module.parameters(recurse=children), *module.buffers(recurse=children)]
            # With autocast off, low-precision weights would not fit fp32 inputs.
            stack.enter_context(state_in([tensor for tensor in own if tensor.dtype in LOW], torch.float32))
        for module in model.modules():
            pre = nn.Module.register_forward_pre_hook(module, regions.enter, with_kwargs=True, prepend=True)
            stack.callback(pre.remove)
            stack.callback(nn.Module.register_forward_hook(module, regions.leave, always_call=True).remove)
        stack.callback(regions.close)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A module call that is open: the region made for it, and autocast's state as the model has it without that.

    `depth` is how many regions were open when its forward began: where there are more, the model opened one itself.
    """

    module: nn.Module
    region: AbstractContextManager[Any] | None
    state: tuple[bool, torch.dtype]
    depth: int


class _Regions:
    """The autocast regions around the module calls that are open; `modes` tells by id which modules are in fp32.

    True stands for a module with all below it, False for its forward alone, which gets its children's output in fp32.
    """

    def __init__(self, modes: Mapping[int, bool], device: torch.device) -> None:
        self._modes = modes
        self._device = device
        self._open: list[_Open] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        name = self._device.type
        state = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
        region: AbstractContextManager[Any] | None = None
        if self._is_in_kept_forward() and self._open[-1].depth == _autocast_depth():
            state = self._open[-1].state
            region = torch.autocast(name, dtype=state[1], enabled=state[0])
        if id(module) in self._modes:
            region = torch.autocast(name, enabled=False)
        if region is not None:
            region.__enter__()
        self._open.append(_Open(module=module, region=region, state=state, depth=_autocast_depth()))
        return _widen((args, kwargs)) if id(module) in self._modes else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._open or self._open[-1].module is not module:
            return None
        self._close_last()
        return _widen(output) if self._is_in_kept_forward() else None

    def _is_in_kept_forward(self) -> bool:
        """Tell whether the innermost open call is of a module whose forward alone is in fp32."""
        return bool(self._open) and self._modes.get(id(self._open[-1].module)) is False

    def close(self) -> None:
        while self._open:
            self._close_last()

    def _close_last(self) -> None:
        region = self._open.pop().region
        if region is not None:
            region.__exit__(None, None, None)


def _autocast_depth() -> int:
    """How many autocast regions are open in this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


@contextmanager
def state_in(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> Iterator[None]:
    """A context in which these weights and buffers are held in another dtype; their own values come back after it."""
    saved = [(tensor, tensor.data) for tensor in tensors]
    for tensor, data in saved:
        tensor.data = data.to(dtype)
    try:
        yield
    finally:
        for tensor, data in saved:
            tensor.data = data


class _OpChanges:
    """The edits that change single ops."""

    def __init__(self, edits: Sequence[SingleEdit], owner: Callable[[], Owner]) -> None:
        self._owner = owner
        self._counts: Counter[tuple[Owner, str]] = Counter()
        self._changes: list[tuple[OpSite, Callable[[Invocation, Proceed], Any]]] = []
        for edit in edits:
            if isinstance(edit, KeepOp):
                self._changes.append((edit.site, _run_in_fp32))
            elif isinstance(edit, SetArgument):
                self._changes.append((edit.site, _Setting(edit)))
            elif isinstance(edit, ClampArgument):
                self._changes.append((edit.site, _Clamping(edit)))
            elif isinstance(edit, UnmaskRows):
                self._changes.append((edit.site, _run_unmasked))
            elif isinstance(edit, StableLog):
                stable = _StableLog(edit)
                self._changes += [(edit.inner, stable.remember), (edit.log, stable.take)]
            elif isinstance(edit, ScaleFirst):
                self._changes += [(edit.product, _Scaling(edit.factor)), (edit.scale, _return_first)]

    @property
    def asked_for(self) -> bool:
        return bool(self._changes)

    def handle(self, call: Invocation, proceed: Proceed) -> Any:
        """Run one op, changed where it is meant."""
        owner = self._owner()
        run = proceed
        for site, change in self._changes:
            # What writes to its argument cannot give a tensor of another dtype, nor one that is not that argument.
            possible = isinstance(change, _Setting) or not schema_of(call.op).is_mutable
            if possible and self._is_meant(site, call, owner):
                run = _Changed(change, run)
        output = run(call)
        # Counted as the op tracer counts: what gives no floating-point tensor is not there.
        if any(format_of(leaf.dtype) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)):
            self._counts[owner, call.name] += 1
        return output

    def _is_meant(self, site: OpSite, call: Invocation, owner: Owner) -> bool:
        if site.op not in ("", call.name):
            return False
        module, type_name, _ = owner
        if site.source is None:
            return site.module == module and self._counts[owner, call.name] == site.nth
        is_there = site.module == LOSS or site.type == type_name
        return is_there and _is_at(site.source)


def _is_at(source: SourceLine) -> bool:
    """Tell whether the user's code is at this line, and in this expression of it where the source names one."""
    place = find_place()
    if place is None or (place[0].co_filename, place[2]) != (source.file, source.line):
        return False
    return source.column is None or to_source(place) == source


class _Changed:
    """An op's run with one change put before it."""

    def __init__(self, change: Callable[[Invocation, Proceed], Any], run: Proceed) -> None:
        self._change = change
        self._run = run

    def __call__(self, call: Invocation) -> Any:
        return self._change(call, self._run)


def _run_in_fp32(call: Invocation, proceed: Proceed) -> Any:
    with without_autocast():
        return proceed(call.mapped(_widen))


class _Setting:
    def __init__(self, edit: SetArgument) -> None:
        self._edit = edit

    def __call__(self, call: Invocation, proceed: Proceed) -> Any:
        numbers = dict(call.scalars())
        was = numbers.get(self._edit.argument)
        if was is None or not math.isclose(was, self._edit.was, rel_tol=_CLOSE):
            return proceed(call)
        value = self._edit.value
        if value is None:
            value = torch.finfo(_format_at(call)).min
        return proceed(call.with_argument(self._edit.argument, value))


def _format_at(call: Invocation) -> torch.dtype:
    """The dtype that a number in this op is held in: that of its first floating-point tensor."""
    dtypes = [tensor.dtype for _, tensor in call.tensors() if tensor.is_floating_point() and tensor.dim()]
    return dtypes[0] if dtypes else torch.float32


class _Clamping:
    def __init__(self, edit: ClampArgument) -> None:
        self._edit = edit
        self._bounds = edit.low, edit.high

    def __call__(self, call: Invocation, proceed: Proceed) -> Any:
        if not self._edit.argument:
            return tree_map(self._clamp, proceed(call))
        given = dict(call.arguments()).get(self._edit.argument)
        return proceed(call.with_argument(self._edit.argument, self._clamp(given)) if given is not None else call)

    def _clamp(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if self._edit.nan:
            value = torch.where(torch.isnan(value), 0.0, value)
        # A bound that the format cannot hold never binds; torch refuses it.
        limit = torch.finfo(value.dtype).max
        low, high = (bound if bound is not None and abs(bound) <= limit else None for bound in self._bounds)
        return value if low is None and high is None else value.clamp(low, high)


class _Scaling:
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, call: Invocation, proceed: Proceed) -> Any:
        name, tensor = next(call.tensors())
        return proceed(call.with_argument(name, tensor * self._factor))


class _StableLog:
    """Remembers what went into a softmax or sigmoid, for the logarithm of its result."""

    def __init__(self, edit: StableLog) -> None:
        self._complement = edit.complement
        self._taken: tuple[torch.Tensor, int | None] | None = None

    def remember(self, call: Invocation, proceed: Proceed) -> Any:
        named = dict(call.arguments())
        self._taken = named["self"], named.get("dim")
        return proceed(call)

    def take(self, call: Invocation, proceed: Proceed) -> Any:
        argument = dict(call.arguments()).get("self")
        if self._taken is None or argument is None:
            return proceed(call)
        taken, dim = self._taken
        if dim is not None:
            made = torch.log_softmax(taken.float(), dim)
        else:
            made = torch.nn.functional.logsigmoid(-taken.float() if self._complement else taken.float())
        # A dimension of one may have come or gone in between; any other change of shape may have moved elements.
        same = [size for size in made.shape if size != 1] == [size for size in argument.shape if size != 1]
        return made.reshape(argument.shape) if same else proceed(call)


def _return_first(call: Invocation, proceed: Proceed) -> Any:
    return next(tensor for _, tensor in call.tensors())


def _run_unmasked(call: Invocation, proceed: Proceed) -> Any:
    """The softmax or attention with its fully masked rows opened, and zero where they were."""
    named = dict(call.arguments())
    if call.name == "scaled_dot_product_attention":
        mask = named.get("attn_mask")
        if mask is None:
            return proceed(call)
        closed = (~mask if mask.dtype == torch.bool else torch.isneginf(mask)).all(-1, keepdim=True)
        opened = mask | closed if mask.dtype == torch.bool else mask.masked_fill(closed, 0.0)
        return proceed(call.with_argument("attn_mask", opened)).masked_fill(closed, 0.0)
    scores, dim = named.get("self"), named.get("dim")
    if not isinstance(scores, torch.Tensor) or not isinstance(dim, int):
        return proceed(call)
    closed = torch.isneginf(scores).all(dim, keepdim=True)
    return proceed(call.with_argument("self", scores.masked_fill(closed, 0.0))).masked_fill(closed, 0.0)
