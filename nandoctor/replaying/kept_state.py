"""Saves the state that a forward may change besides its output before a run, and restores it afterwards.

`restored` covers parameters, buffers, other tensors, attributes, containers, random generators and caches of the
model, and of the files that define its classes.
"""

from __future__ import annotations

import builtins
import random
import sys
import threading
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial
from operator import is_, setitem
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from nandoctor.process_wide import collection_paused, held
from nandoctor.replaying.kept_memory import tensors_kept

_DEPTH = 5
_MOST_VALUES = 200_000
_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None), type, type(len), type(lambda: 0), torch.dtype})
_NOT_THE_MODELS = ("torch", "numpy", "nandoctor", "builtins", "threading", "logging")

Undo = Callable[[], object]
_Cached = type(lru_cache(lambda: None))
_CONTAINERS = (OrderedDict, dict, list, deque, set)
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_UNBOUND = (staticmethod, classmethod)
_UNSET = object()
_THE_INTERPRETERS = (vars(builtins), sys.modules)
"""Every file refers to the first, a model may refer to the second: other code may be using what a run adds to them."""


@contextmanager
def restored(model: nn.Module, *, traced: bool = False) -> Iterator[Sequence[torch.Tensor]]:
    """Restore weights and buffers, written in place or replaced, and all other state that a forward changes.

    It yields the tensors that the model holds. State in closures, in iterators and in the memory of compiled extensions
    is not covered. `traced` says that the run's ops are intercepted, so that no dispatch mode can be open.
    """
    found = _find_state(model)
    with ExitStack() as stack:
        stack.enter_context(tensors_kept(found.tensors, traced=traced))
        stack.callback(_undo_all, list(found.undo))
        yield found.tensors


class _Known(threading.local):
    """A thread's cache of models and the state found in them; None while a model may change between runs."""

    states: dict[object, tuple[nn.Module, _State]] | None = None


_known = _Known()


def state_known() -> AbstractContextManager[None]:
    """Return a context for many runs of models that nothing else changes, in which each model is searched only once."""
    return held((_known, "states", {}))


def _find_state(model: nn.Module) -> _State:
    with collection_paused:
        if _known.states is None:
            return _State(model)
        modes = (id(model), *(module.training for module in model.modules()))
        if modes not in _known.states:
            _known.states[modes] = model, _State(model)
        return _known.states[modes][1]


def _undo_all(undo: list[Undo]) -> None:
    """Undo in reverse order, all of it whatever one of them raises."""
    try:
        while undo:
            undo.pop()()
    finally:
        if undo:
            _undo_all(undo)


class _State:
    """All that can be reached from a model: its tensors, each once, and how to restore everything else."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.undo: list[Undo] = []
        # With the values, since the id of a deleted one may be reused.
        self._seen: dict[int, Any] = {id(value): value for value in _THE_INTERPRETERS}
        self._waiting: deque[tuple[Any, int]] = deque()
        self._left = _MOST_VALUES
        self._add((*model.parameters(), *model.buffers(), *model.modules()), _DEPTH)
        for scope in scopes_of(model):
            self._add_scope(scope)
        while self._waiting:  # no recursion: modules may refer to one another in a chain of any length
            self._keep(*self._waiting.popleft())

    def _add(self, values: Iterable[Any], depth: int) -> None:
        of_module = depth >= _DEPTH - 1  # a module or an attribute of it: no limit on these
        for value in values:
            if type(value) not in _PLAIN and id(value) not in self._seen and (of_module or self._left > 0):
                self._seen[id(value)] = value
                self._left -= not of_module
                self._waiting.append((value, depth))

    def _add_scope(self, scope: Any) -> None:
        """Save what a class, or the file that defines it, holds besides functions."""
        saved = dict(vars(scope))
        self.undo.append(lambda: _reset_names(scope, saved))
        plain = (getattr(value, "__func__", value) if _is(value, *_UNBOUND) else value for value in saved.values())
        self._add((value for value in plain if _is(value, *_CONTAINERS, *_GENERATORS, _Cached, torch.Tensor)), 2)

    def _keep(self, value: Any, depth: int) -> None:
        if type(value) in _CONTAINERS and depth:  # the usual case
            self._keep_container(value, depth - 1)
        elif _is(value, torch.Tensor):
            if hasattr(type(value), "__tensor_flatten__"):  # a wrapper, whose parts hold the memory
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
        # A subclass's methods may do or refuse anything, so those of the built-in type are called.
        base = next((kind for kind in type(value).__mro__ if kind in _CONTAINERS), None)
        if base is OrderedDict or base is dict:
            saved = list(base.keys(value)), list(base.values(value))
            self.undo.append(lambda: _refill(base, value, *saved))
            self._add(saved[1], depth)
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
    """Return True if the value's own type is one of these; `isinstance` would ask the value, which may be a proxy."""
    return issubclass(type(value), kinds)


def scopes_of(model: nn.Module) -> Iterator[Any]:
    """Yield the model's classes that are not torch's, and the files that define them, but no interactive session."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if _is_of_the_model(kind)}
    yield from kinds
    files = {str(kind.__module__) for kind in kinds} - {"__main__"}
    yield from (sys.modules[name] for name in sorted(files) if _is(sys.modules.get(name), ModuleType))


def _is_of_the_model(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] not in _NOT_THE_MODELS


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes, even if its class redefines `__dict__`."""
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


def _refill(base: Any, target: Any, keys: list[Any], values: list[Any]) -> None:
    is_same = len(keys) == base.__len__(target) and all(map(is_, keys, base.keys(target)))
    if not is_same or not all(map(is_, values, base.values(target))):
        base.clear(target)
        for key, value in zip(keys, values, strict=True):
            if not (_is_dead(key) or _is_dead(value)):
                base.__setitem__(target, key, value)


def _relist(base: Any, target: Any, items: list[Any]) -> None:
    if len(items) != base.__len__(target) or not all(map(is_, items, base.__iter__(target))):
        base.clear(target)
        (base.update if base is set else base.extend)(target, (item for item in items if not _is_dead(item)))


def _is_dead(value: Any) -> bool:
    """Return True for a weak reference to a deleted object, which no weak collection would hold any longer."""
    return _is(value, weakref.ref) and value() is None


def _reset_names(scope: Any, saved: dict[str, Any]) -> None:
    """Restore the names of a class or file; what was imported or defined meanwhile stays."""
    base = type if _is(scope, type) else ModuleType  # the class of either may refuse writes
    now = dict(vars(scope))
    for name, value in now.items():
        if name not in saved and not (name.startswith("__") or _is(value, ModuleType, type, FunctionType)):
            base.__delattr__(scope, name)
    for name, value in saved.items():
        if not name.startswith("__") and now.get(name, saved) is not value:
            base.__setattr__(scope, name, value)


def _generator_state(value: Any) -> Undo:
    """Return a function that restores a random generator of the model's own."""
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
    if not values.flags.writeable:  # such as a dataset mapped from a file
        return lambda: None
    plain = values.view(np.ndarray)
    saved = plain.copy()
    return lambda: np.copyto(plain, saved)
