"""Saves the state that a run may change besides its output before the run, and restores it afterwards."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.file_memory import map_empty
from nandoctor.torch_compat import no_subclass_methods, storage_of, tree_tensors
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, intercepting

_CONTAINERS = (dict, OrderedDict, list, deque, set)
_WATCHED_NBYTES = 32 << 20
"""Less memory than this is copied faster than every op is watched."""
_SMALL_NBYTES = 1 << 16


@contextmanager
def restored(model: nn.Module) -> Iterator[tuple[Sequence[torch.Tensor], Callable[[torch.Tensor], bool]]]:
    """Restore what the model's code, or the run itself, changes in the model in this context.

    These are weights and buffers, written in place or replaced, and the modules' attributes, the containers directly in
    these, and the tensors and random generators in either; not state in files' globals, in closures, in caches of
    functions and deeper in objects. It yields the tensors that the model holds, and a function that returns True for
    one that no op has written to so far. Small tensors are copied before the run; large ones, whose memory may be a
    mapped file, just before the first write to them.
    """
    state = _State(model)
    with no_subclass_methods():  # a subclass's own methods may answer otherwise
        memory = state.keep_tensors()
        if memory.nbytes < _WATCHED_NBYTES:
            memory.keep_all(below=_WATCHED_NBYTES)  # so all of it
        else:
            memory.keep_all(below=_SMALL_NBYTES)
            state.undo.enter_context(intercepting(memory.keep_written))
    try:
        yield state.tensors, memory.is_unwritten
    finally:
        with no_subclass_methods(), torch.no_grad():
            state.undo.close()


class _State:
    """The tensors that a model holds, each once, and what restores the state, last to first."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.undo = ExitStack()
        self._seen: dict[int, Any] = {}  # with the values, since the id of a deleted one may be reused
        self._waiting: list[nn.Module] = []
        self._keep(model)
        while self._waiting:
            self._keep_module(self._waiting.pop())

    def _keep_module(self, module: nn.Module) -> None:
        attributes = dict(vars(module))
        self.undo.callback(lambda: _put_back(vars(module), attributes))
        self.undo.callback(object.__setattr__, module, "__class__", type(module))  # a lazy module becomes another one
        if isinstance(module, torch.jit.ScriptModule):  # it keeps its tensors in C++
            for tensor in (*module.parameters(), *module.buffers()):
                self._keep(tensor)
        for value in attributes.values():
            self._keep(value)
            if type(value) in _CONTAINERS:
                self._keep_container(value)

    def _keep_container(self, container: Any) -> None:
        saved = container.copy()
        self.undo.callback(_put_back, container, saved)
        for value in saved.values() if isinstance(saved, dict) else saved:
            self._keep(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        if _is(value, torch.Tensor):
            self._seen[id(value)] = value
            if hasattr(type(value), "__tensor_flatten__"):  # a wrapper, whose parts hold the memory
                self.undo.callback(setattr, value, "grad", value.grad if value.is_leaf else None)
                for name in value.__tensor_flatten__()[0]:
                    self._keep(getattr(value, name))
            else:
                self.tensors.append(value)
        elif _is(value, nn.Module):
            self._seen[id(value)] = value
            self._waiting.append(value)
        elif (undo := _undo_draws(value)) is not None:
            self._seen[id(value)] = value
            self.undo.callback(undo)

    def keep_tensors(self) -> _Memory:
        """Note the tensors as they are, and return their memory, which is still to be copied."""
        strided = [tensor for tensor in self.tensors if tensor.layout is torch.strided and not tensor.is_meta]
        grads = [tensor.grad for tensor in strided if tensor.is_leaf and tensor.grad is not None]
        memory = _Memory(it for it in (*strided, *grads) if it.layout is torch.strided and not is_lazy(it))
        for tensor in self.tensors:
            if tensor.layout is not torch.strided:
                self.undo.callback(tensor.copy_, tensor.detach().clone())
        self.undo.callback(memory.put_back)
        for tensor in self.tensors:
            grad = tensor.grad if tensor.is_leaf else None
            self.undo.callback(_put_back_header, tensor, type(tensor), tensor.data, tensor.requires_grad, grad)
        return memory


def _is(value: Any, kind: type) -> bool:
    """Return True if the value's own type is this one; `isinstance` would ask the value, which may be a proxy."""
    return issubclass(type(value), kind)


def _put_back(container: Any, saved: Any) -> None:
    """Give a container its items again, in their order; one that has them is left alone, since a loop may be in it."""
    now, before = (list(chain.from_iterable(it.items()) if isinstance(it, dict) else it) for it in (container, saved))
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    container.clear()
    (container.extend if isinstance(saved, (list, deque)) else container.update)(saved)


def _undo_draws(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random generator of the model's own; None for anything else."""
    if _is(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if type(value) is random.Random:
        return partial(value.setstate, value.getstate())
    if _is(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if _is(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _put_back_header(
    tensor: torch.Tensor, kind: type, data: torch.Tensor, requires_grad: bool, grad: torch.Tensor | None
) -> None:
    """Give a tensor its attributes again, besides the content of its memory."""
    tensor.data = data
    if type(tensor) is not kind:
        tensor.__class__ = kind
    if tensor.is_leaf:
        if tensor.requires_grad is not requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad


class _Memory:
    """The storages of some tensors, each once, and the copies that were made of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._flat = {  # as bytes
            storage_of(tensor): torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for tensor in tensors
        }
        self.nbytes = sum(flat.numel() for flat in self._flat.values())
        self._copies: dict[int, torch.Tensor] = {}

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's memory is that of the model, and would have been copied before a write to it."""
        if tensor.layout is not torch.strided or is_lazy(tensor):
            return False
        storage = storage_of(tensor)
        return storage in self._flat and storage not in self._copies

    def keep_all(self, *, below: int) -> None:
        """Copy every storage of less than `below` bytes in memory."""
        for storage, flat in self._flat.items():
            if flat.numel() < below:
                self._copies[storage] = flat.clone()

    def keep_written(self, call: Invocation, proceed: Proceed) -> Any:
        """Copy what an op writes to first, to a file if it is on the CPU, and run it."""
        written = call.signature.changed
        for name, value in call.arguments() if written else ():
            for tensor in filter(self.is_unwritten, tree_tensors(value) if name in written else ()):
                flat = self._flat[storage_of(tensor)]
                copy = map_empty(flat.shape, flat.dtype).copy_(flat) if flat.is_cpu else flat.clone()
                self._copies[storage_of(tensor)] = copy
        return proceed(call)

    def put_back(self) -> None:
        for storage, copy in self._copies.items():
            memory = self._flat[storage].untyped_storage()
            if memory.nbytes() < copy.numel():
                memory.resize_(copy.numel())
            self._flat[storage].copy_(copy)
