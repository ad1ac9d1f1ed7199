"""The state that a forward may change beside its output: what to keep of it before a run, and put back after it.

In: a model. Out: `restored`, a context after which parameters, buffers, other tensors, attributes, containers, random
generators and caches of the model, and of the files that its classes are written in, are as they were.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.file_memory import map_empty
from nandoctor.torch_compat import TorchDispatchMode, schema_of, storage_of, tree_leaves
from nandoctor.tracing.dispatch_hook import Proceed, intercepting
from nandoctor.tracing.op_call import Invocation

_DEPTH = 5
_MOST_VALUES = 200_000
_WATCHED_NBYTES = 32 << 20
"""Less is copied more quickly than every operation is looked at."""
_SMALL_NBYTES = 1 << 16
_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None), type, type(len), type(lambda: 0), torch.dtype})
_NOT_THE_MODELS = ("torch", "numpy", "nandoctor", "builtins", "collections", "threading", "logging")

Undo = Callable[[], object]
_Cached = type(lru_cache(lambda: None))


@contextmanager
def restored(model: nn.Module, *, traced: bool = False) -> Iterator[Sequence[torch.Tensor]]:
    """Put back what a forward changes: weights and buffers, written in place or replaced, and all other state.

    It yields the tensors that the model holds. What lies in closures, in iterators and in the memory of compiled
    extensions is not known here. `traced` says that the run's operations are intercepted, beside which no dispatch mode
    can be open.
    """
    found = _State(model)
    with ExitStack() as stack:
        stack.enter_context(_tensors_kept(found.tensors, traced=traced))
        for undo in found.undo:
            stack.callback(undo)
        yield found.tensors


class _State:
    """All that can be reached from a model: its tensors, each once, and how to put everything else back."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.undo: list[Undo] = []
        self._seen: set[int] = set()
        self._left = _MOST_VALUES
        for module in model.modules():
            self._visit(module, _DEPTH)
        for scope in _scopes_of(model):
            self._visit_scope(scope)

    def _visit(self, value: Any, depth: int) -> None:
        if type(value) in _PLAIN or id(value) in self._seen or not self._left:
            return
        self._seen.add(id(value))
        self._left -= 1
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value)
        elif isinstance(value, nn.Module):
            self._visit_module(value, _DEPTH)
        elif (state := _generator_state(value)) is not None:
            self.undo.append(state)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self.undo.append(_keep_array(value))
        elif depth:
            self._visit_container(value, depth - 1)

    def _visit_tensor(self, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):  # a wrapper of others, which hold the memory
            self._visit_all((getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]), 0)
        else:
            self.tensors.append(tensor)

    def _visit_module(self, module: nn.Module, depth: int) -> None:
        # A ScriptModule keeps its attributes in C++, where its graph can write to them but not replace them.
        if isinstance(module, torch.jit.ScriptModule):
            self._visit_all((*module.parameters(), *module.buffers()), 0)
            return
        kind = type(module)
        self.undo.append(lambda: setattr(module, "__class__", kind) if type(module) is not kind else None)
        self._visit_container(vars(module), depth)

    def _visit_container(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            saved = dict(dict.items(value))  # not by way of a subclass, whose __getitem__ may build something
            self.undo.append(lambda: _refill(value, saved))
            self._visit_all(saved.values(), depth)
        elif isinstance(value, (list, deque, set)):
            items = list(value)
            self.undo.append(lambda: _relist(value, items))
            self._visit_all(items, depth)
        elif isinstance(value, (tuple, frozenset)):
            self._visit_all(value, depth)
        elif _is_own_object(value):
            self._visit_container(vars(value), depth)

    def _visit_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._visit(value, depth)

    def _visit_scope(self, scope: Any) -> None:
        """Keep what a class, or the file that it is written in, has beside functions; empty its functions' caches."""
        saved = dict(vars(scope))
        self.undo.append(lambda: _reset_names(scope, saved))
        for value in saved.values():
            if isinstance(value, _Cached):
                value.cache_clear()
            elif isinstance(value, (dict, list, deque, set, torch.Tensor)):
                self._visit(value, 2)


def _scopes_of(model: nn.Module) -> Iterator[Any]:
    """The classes of the model that are not torch's, and the files they are from; never the interactive session."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if _is_of_the_model(kind)}
    yield from kinds
    files = {kind.__module__ for kind in kinds} - {"__main__"}
    yield from (sys.modules[name] for name in sorted(files) if name in sys.modules)


def _is_of_the_model(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _NOT_THE_MODELS


def _is_own_object(value: Any) -> bool:
    """Tell whether this is an object of the model's code, with attributes in Python."""
    return _is_of_the_model(type(value)) and not callable(value) and isinstance(getattr(value, "__dict__", None), dict)


def _refill(target: dict[Any, Any], saved: dict[Any, Any]) -> None:
    now = dict(dict.items(target))
    if len(now) != len(saved) or any(now.get(key, now) is not value for key, value in saved.items()):
        target.clear()
        target.update(saved)


def _relist(target: Any, items: list[Any]) -> None:
    if len(target) != len(items) or any(a is not b for a, b in zip(target, items, strict=True)):
        target.clear()
        (target.update if isinstance(target, set) else target.extend)(items)


def _reset_names(scope: Any, saved: dict[str, Any]) -> None:
    """Set the names of a class or a file as they were; what was imported or defined meanwhile stays."""
    now = dict(vars(scope))
    for name, value in now.items():
        if name not in saved and not (name.startswith("__") or isinstance(value, (ModuleType, type, FunctionType))):
            delattr(scope, name)
    for name, value in saved.items():
        if not name.startswith("__") and now.get(name, saved) is not value:
            setattr(scope, name, value)


def _generator_state(value: Any) -> Undo | None:
    """How to put a random generator of the model's own back; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _keep_array(array: np.ndarray[Any, Any]) -> Undo:
    saved = array.copy()
    return lambda: np.copyto(array, saved) if array.flags.writeable else None


@contextmanager
def _tensors_kept(tensors: Sequence[torch.Tensor], *, traced: bool) -> Iterator[None]:
    """Give every tensor its class, memory, shape and content back.

    Small ones are copied before the run. Of large ones, whose memory may be a mapped file, what is written to is copied
    just before the first write.
    """
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    headers = [(tensor, type(tensor), tensor.data, tensor.requires_grad) for tensor in dense]
    others = [(tensor, tensor.detach().clone()) for tensor in tensors if tensor.layout is not torch.strided]
    memory = _Memory(tensor for tensor in dense if not is_lazy(tensor))
    with ExitStack() as stack:
        if memory.nbytes >= _WATCHED_NBYTES:
            memory.keep_all(below=_SMALL_NBYTES)  # a batch norm does not say that it writes its statistics
            stack.enter_context(intercepting(memory.keep_written) if traced else _CopyOnWrite(memory))
        else:
            memory.keep_all()
        try:
            yield
        finally:
            for header in headers:
                _put_header_back(*header)
            stack.close()
            memory.put_back()
            with torch.no_grad():
                for tensor, saved in others:
                    tensor.copy_(saved)


def _put_header_back(tensor: torch.Tensor, kind: type, data: torch.Tensor, requires_grad: bool) -> None:
    tensor.data = data
    if type(tensor) is not kind:
        tensor.__class__ = kind
    if tensor.is_leaf and tensor.requires_grad is not requires_grad:
        tensor.requires_grad_(requires_grad)


class _Memory:
    """The storages of tensors, each once however many tensors share it, and copies of those that are kept."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._flat = {storage_of(tensor): _bytes_of(tensor) for tensor in tensors}
        self._copies: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(flat.numel() for flat in self._flat.values())

    def keep(self, storage: int, *, in_file: bool = True) -> None:
        """Copy a storage of the model's before the first write to it."""
        if storage in self._flat and storage not in self._copies:
            flat = self._flat[storage]
            self._copies[storage] = (
                map_empty(flat.shape, flat.dtype).copy_(flat) if in_file and flat.is_cpu else flat.clone()
            )

    def keep_all(self, *, below: float = math.inf) -> None:
        """Copy every storage of less than so many bytes."""
        for storage, flat in self._flat.items():
            if flat.numel() < below:
                self.keep(storage, in_file=False)

    def keep_written(self, call: Invocation, proceed: Proceed) -> Any:
        """Copy what an operation writes to, and run it."""
        written = {argument.name for argument in schema_of(call.op).arguments if _is_written(argument)}
        for name, value in call.arguments() if written else ():
            for tensor in tree_leaves(value) if name in written else ():
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self.keep(storage_of(tensor))
        return proceed(call)

    def put_back(self) -> None:
        for storage, copy in self._copies.items():
            if self._flat[storage].untyped_storage().nbytes() >= copy.numel():
                self._flat[storage].copy_(copy)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has memory copied before the first operation that writes to it."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        return self._memory.keep_written(Invocation(op=func, args=args, kwargs=kwargs or {}), Invocation.run)
