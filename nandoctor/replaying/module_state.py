"""A model's weights and buffers as a run meets them: their names, their format, and which of them are non-finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.autocast.policy import EXACT, LOW_DTYPES, REFERENCE, Policy, torch_dtype
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.trace import ModuleCall, TensorStats
from nandoctor.file_memory import cast_to_file
from nandoctor.machine import memory_of
from nandoctor.replaying.backward_pass import LARGE_NBYTES
from nandoctor.torch_compat import is_running_norm
from nandoctor.tracing.op_tracer import TensorKind
from nandoctor.tracing.tensor_stats import is_finite, measure, measure_all


def known_tensors(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> Iterator[tuple[TensorKind, str, torch.Tensor]]:
    """What the ops meet from outside."""
    idle = (module for module in model.modules() if _writes_only(module))
    unread = {id(buffer) for module in idle for buffer in module.buffers(recurse=False)}
    yield from (("weight", name, tensor) for name, tensor in model.named_parameters() if not is_lazy(tensor))
    for name, tensor in model.named_buffers():
        if not is_lazy(tensor):
            yield "unread" if id(tensor) in unread else "buffer", name, tensor
    yield from (("batch", name, tensor) for name, tensor in batch.items())


def with_nonfinite_state(calls: tuple[ModuleCall, ...], model: nn.Module, low: FloatFormat) -> tuple[ModuleCall, ...]:
    """The calls, each with its module's non-finite state; it reads every weight, so only call it after a failure."""
    if all(stats.finite for call in calls for stats in (*call.inputs, *call.outputs)):
        return calls
    state = _nonfinite_state(model, low)
    return tuple(replace(call, state=state.get(call.module, ())) for call in calls)


def _nonfinite_state(model: nn.Module, low: FloatFormat) -> dict[str, tuple[TensorStats, ...]]:
    """Per module path, its own non-finite weights and the non-finite buffers that a forward would read."""
    nonfinite: dict[str, tuple[TensorStats, ...]] = {}
    for path, module in model.named_modules():
        buffers = () if _writes_only(module) else module.named_buffers(recurse=False)
        own = (*module.named_parameters(recurse=False), *buffers)
        if found := [(name, tensor) for name, tensor in own if not is_finite(measure(tensor))]:
            nonfinite[path] = measure_all(found, counts_for=low)
    return nonfinite


def _writes_only(module: nn.Module) -> bool:
    """Whether this is a norm layer in train mode, which writes its running statistics and does not read them."""
    return is_running_norm(module) and module.training


def state_widened(state: Iterable[torch.Tensor], policy: Policy) -> AbstractContextManager[None]:
    """The model's tensors in the format of a reference, which half-precision ones would round."""
    narrower = [tensor for tensor in state if _is_narrower(tensor, policy)]
    return state_in(narrower, torch_dtype(policy.format), in_files=memory_of(narrower) >= LARGE_NBYTES)


def widened(tensor: torch.Tensor, policy: Policy) -> torch.Tensor:
    """The tensor in the format of a reference."""
    return tensor.to(torch_dtype(policy.format)) if _is_narrower(tensor, policy) else tensor


def _is_narrower(tensor: torch.Tensor, policy: Policy) -> bool:
    """Tell whether a reference widens this tensor: fp32 half precision, fp64 everything."""
    if is_lazy(tensor):
        return False
    return tensor.dtype in LOW_DTYPES if policy is REFERENCE else policy is EXACT and tensor.is_floating_point()


@contextmanager
def state_in(tensors: Iterable[torch.Tensor], dtype: torch.dtype, *, in_files: bool) -> Iterator[None]:
    """A context in which these weights and buffers are held in another dtype; their own values come back after it.

    With `in_files` large ones lie in files meanwhile.
    """
    saved = [(tensor, tensor.data) for tensor in tensors]
    to = cast_to_file if in_files else torch.Tensor.to
    for tensor, data in saved:
        tensor.data = to(data, dtype)
    try:
        yield
    finally:
        for tensor, data in saved:
            tensor.data = data
