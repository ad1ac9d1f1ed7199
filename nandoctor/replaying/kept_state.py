"""The state that a forward may change beside its output: what to keep of it before a run, and put back after it.

After `restored`, parameters, buffers, other tensors, attributes, containers, random generators and caches of the model,
and of the files that its classes are written in, are as they were.
"""

from __future__ import annotations

import builtins
import math
import random
import sys
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache, partial
from operator import setitem
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.file_memory import map_empty
from nandoctor.process_wide import collection_paused
from nandoctor.torch_compat import TorchDispatchMode, no_subclass_methods, schema_of, storage_of, tree_leaves
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, intercepting

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload

_DEPTH = 5
_MOST_VALUES = 200_000
_WATCHED_NBYTES = 32 << 20
"""Less is copied more quickly than every operation is looked at."""
_SMALL_NBYTES = 1 << 16
_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None), type, type(len), type(lambda: 0), torch.dtype})
_NOT_THE_MODELS = ("torch", "numpy", "nandoctor", "builtins", "threading", "logging")

Undo = Callable[[], object]
_Cached = type(lru_cache(lambda: None))
_CONTAINERS = (OrderedDict, dict, list, deque, set)
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_UNBOUND = (staticmethod, classmethod)
_UNSET = object()
_THE_INTERPRETERS = (vars(builtins), sys.modules)
"""Every file refers to the first, a model may to the second: what a run adds to them others may be using."""


@contextmanager
def restored(model: nn.Module, *, traced: bool = False) -> Iterator[Sequence[torch.Tensor]]:
    """Put back what a forward changes: weights and buffers, written in place or replaced, and all other state.

    It yields the tensors that the model holds. What lies in closures, in iterators and in the memory of compiled
    extensions is not known here. `traced` says that the run's operations are intercepted, beside which no dispatch mode
    can be open.
    """
    with collection_paused:
        found = _State(model)
    with ExitStack() as stack:
        stack.enter_context(_tensors_kept(found.tensors, traced=traced))
        stack.callback(_undo_all, found.undo)
        yield found.tensors


def _undo_all(undo: list[Undo]) -> None:
    """The last first, and all of them whatever one of them raises."""
    try:
        while undo:
            undo.pop()()
    finally:
        if undo:
            _undo_all(undo)


class _State:
    """All that can be reached from a model: its tensors, each once, and how to put everything else back."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.undo: list[Undo] = []
        # With the values, for the id of one that is gone may be another's.
        self._seen: dict[int, Any] = {id(value): value for value in _THE_INTERPRETERS}
        self._waiting: deque[tuple[Any, int]] = deque()
        self._left = _MOST_VALUES
        self._add((*model.parameters(), *model.buffers(), *model.modules()), _DEPTH)
        for scope in scopes_of(model):
            self._add_scope(scope)
        while self._waiting:  # no recursion: modules may refer to one another in a chain of any length
            self._keep(*self._waiting.popleft())

    def _add(self, values: Iterable[Any], depth: int) -> None:
        of_module = depth >= _DEPTH - 1  # itself, or an attribute of it: kept however many there are
        for value in values:
            if type(value) not in _PLAIN and id(value) not in self._seen and (of_module or self._left > 0):
                self._seen[id(value)] = value
                self._left -= not of_module
                self._waiting.append((value, depth))

    def _add_scope(self, scope: Any) -> None:
        """Keep what a class, or the file that it is written in, has beside functions."""
        saved = dict(vars(scope))
        self.undo.append(lambda: _reset_names(scope, saved))
        plain = (getattr(value, "__func__", value) if _is(value, *_UNBOUND) else value for value in saved.values())
        self._add((value for value in plain if _is(value, *_CONTAINERS, *_GENERATORS, _Cached, torch.Tensor)), 2)

    def _keep(self, value: Any, depth: int) -> None:
        if type(value) in _CONTAINERS and depth:  # as most are
            self._keep_container(value, depth - 1)
        elif _is(value, torch.Tensor):
            if hasattr(type(value), "__tensor_flatten__"):  # a wrapper of others, which hold the memory
                self._add((getattr(value, name) for name in value.__tensor_flatten__()[0]), 0)
            else:
                self.tensors.append(value)
        elif _is(value, torch.jit.ScriptModule):
            # It keeps its attributes in C++, where its graph can write to them but not replace them.
            self._add((*value.parameters(), *value.buffers()), 0)
        elif _is(value, nn.Module):
            kind = type(value)
            self.undo.append(lambda: object.__setattr__(value, "__class__", kind) if type(value) is not kind else None)
            self._keep_object(value, _DEPTH)
        elif _is(value, _Cached):
            value.cache_clear()
            self.undo.append(value.cache_clear)
        elif _is(value, *_GENERATORS):
            self.undo.append(_generator_state(value))
        elif _is(value, np.ndarray):
            self.undo.append(_keep_array(value))
            self._add((_attributes_of(value), *(value.flat if value.dtype == object else ())), depth - 1)
        elif _is(value, bytearray, array):
            self.undo.append(partial(setitem, value, slice(None), value[:]))
        elif depth:
            self._keep_container(value, depth - 1)

    def _keep_container(self, value: Any, depth: int) -> None:
        # Of a subclass, the methods may do or refuse anything: those of the type that it is made of are asked.
        base = next((kind for kind in type(value).__mro__ if kind in _CONTAINERS), None)
        if base is OrderedDict or base is dict:
            saved = list(base.items(value))
            self.undo.append(lambda: _refill(base, value, saved))
            self._add((item for _, item in saved), depth)
        elif base is not None:
            items = list(base.__iter__(value))
            self.undo.append(lambda: _relist(base, value, items))
            self._add(items, depth)
        elif _is(value, tuple, frozenset):
            self._add(tuple.__iter__(value) if _is(value, tuple) else frozenset.__iter__(value), depth)
        elif _is(value, partial):
            self._add((value.args, value.keywords), depth)
        elif _is_of_the_model(type(value)) and not _is(value, type):
            self._keep_object(value, depth)

    def _keep_object(self, value: Any, depth: int) -> None:
        slots = {slot: _read(slot, value) for slot in _slots_of(type(value))}
        self.undo.append(lambda: _reset_slots(value, slots))
        self._add((_attributes_of(value), *slots.values()), depth)


def _is(value: Any, *kinds: Any) -> bool:
    """Tell whether a value is one of a type; unlike `isinstance`, without asking the value, which may be a proxy."""
    return issubclass(type(value), kinds)


def scopes_of(model: nn.Module) -> Iterator[Any]:
    """The classes of the model that are not torch's, and the files they are from; never the interactive session."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if _is_of_the_model(kind)}
    yield from kinds
    files = {str(kind.__module__) for kind in kinds} - {"__main__"}
    yield from (sys.modules[name] for name in sorted(files) if _is(sys.modules.get(name), ModuleType))


def _is_of_the_model(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] not in _NOT_THE_MODELS


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes, whatever its class makes of the name `__dict__`."""
    places = (vars(kind).get("__dict__") for kind in type(value).__mro__)
    own = next((place for place in places if isinstance(place, (GetSetDescriptorType, MemberDescriptorType))), None)
    return None if own is None else own.__get__(value)


def _slots_of(kind: type) -> Iterator[MemberDescriptorType]:
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            yield from (member for member in vars(base).values() if isinstance(member, MemberDescriptorType))


def _read(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _UNSET


def _reset_slots(value: Any, saved: dict[MemberDescriptorType, Any]) -> None:
    for slot, item in saved.items():
        if _read(slot, value) is not item:
            slot.__delete__(value) if item is _UNSET else slot.__set__(value, item)


def _refill(base: Any, target: Any, saved: list[tuple[Any, Any]]) -> None:
    now = ((key, base.__getitem__(target, key)) for key in base.__iter__(target))
    if len(saved) != base.__len__(target) or any(
        a is not b or x is not y for (a, x), (b, y) in zip(saved, now, strict=True)
    ):
        base.clear(target)
        for key, value in saved:
            if not (_is_dead(key) or _is_dead(value)):
                base.__setitem__(target, key, value)


def _relist(base: Any, target: Any, items: list[Any]) -> None:
    if len(items) != base.__len__(target) or any(a is not b for a, b in zip(items, base.__iter__(target), strict=True)):
        base.clear(target)
        (base.update if base is set else base.extend)(target, (item for item in items if not _is_dead(item)))


def _is_dead(value: Any) -> bool:
    """Tell whether it is a weak reference to what is gone, which no weak collection would hold any longer."""
    return _is(value, weakref.ref) and value() is None


def _reset_names(scope: Any, saved: dict[str, Any]) -> None:
    """Set the names of a class or a file as they were; what was imported or defined meanwhile stays."""
    base = type if _is(scope, type) else ModuleType  # the class of either may refuse to be written to
    now = dict(vars(scope))
    for name, value in now.items():
        if name not in saved and not (name.startswith("__") or _is(value, ModuleType, type, FunctionType)):
            base.__delattr__(scope, name)
    for name, value in saved.items():
        if not name.startswith("__") and now.get(name, saved) is not value:
            base.__setattr__(scope, name, value)


def _generator_state(value: Any) -> Undo:
    """How to put a random generator of the model's own back."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.SystemRandom):  # has no state
        return lambda: None
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return partial(setattr, value.bit_generator, "state", value.bit_generator.state)


def _keep_array(values: np.ndarray[Any, Any]) -> Undo:
    if not values.flags.writeable:  # as a data set's is that is mapped from a file
        return lambda: None
    plain = values.view(np.ndarray)
    saved = plain.copy()
    return lambda: np.copyto(plain, saved)


@contextmanager
def _tensors_kept(tensors: Sequence[torch.Tensor], *, traced: bool) -> Iterator[None]:
    """Give every tensor its class, memory, shape and content back.

    Small ones are copied before the run. Of large ones, whose memory may be a mapped file, what is written to is copied
    just before the first write.
    """
    with no_subclass_methods():  # what is asked of a tensor here is not for its class to answer
        dense = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
        headers = [_Header(tensor) for tensor in dense]
        others = [(tensor, tensor.detach().clone()) for tensor in tensors if tensor.layout is not torch.strided]
        grads = [header.grad for header in headers if header.grad is not None and header.grad.layout is torch.strided]
        memory = _Memory(tensor for tensor in (*dense, *grads) if not is_lazy(tensor))
    with ExitStack() as stack:
        if memory.nbytes >= _WATCHED_NBYTES:
            memory.keep_all(below=_SMALL_NBYTES)  # a batch norm does not say that it writes its statistics
            stack.enter_context(intercepting(memory.keep_written) if traced else _CopyOnWrite(memory))
        else:
            memory.keep_all()
        try:
            yield
        finally:
            with no_subclass_methods(), torch.no_grad():
                for header in headers:
                    header.put_back()
                stack.close()
                memory.put_back()
                for tensor, saved in others:
                    tensor.copy_(saved)


class _Header:
    """What a tensor has beside its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._kind, self._data = tensor, type(tensor), tensor.data
        self._requires_grad = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def put_back(self) -> None:
        tensor = self._tensor
        tensor.data = self._data
        if type(tensor) is not self._kind:
            tensor.__class__ = self._kind
        if tensor.is_leaf:
            if tensor.requires_grad is not self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad


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
        written = written_by(call.op)
        for name, value in call.arguments() if written else ():
            for tensor in tree_leaves(value) if name in written else ():
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self.keep(storage_of(tensor))
        return proceed(call)

    def put_back(self) -> None:
        for storage, copy in self._copies.items():
            memory = self._flat[storage].untyped_storage()
            if memory.nbytes() < copy.numel():
                memory.resize_(copy.numel())
            self._flat[storage].copy_(copy)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@cache
def written_by(op: OpOverload) -> frozenset[str]:
    """The names of the arguments that an operation writes to."""
    aliases = ((argument.name, argument.alias_info) for argument in schema_of(op).arguments)
    return frozenset(name for name, alias in aliases if alias is not None and alias.is_write)


class _CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has memory copied before the first operation that writes to it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out torch's wrapper around each call: it imports the compiler, and takes as long as all else here."""
        return False

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not written_by(func):  # as of nearly all
            return func(*args, **(kwargs or {}))
        return self._memory.keep_written(Invocation(op=func, args=args, kwargs=kwargs or {}), Invocation.run)
