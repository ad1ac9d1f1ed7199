"""Saves the state that a forward may change besides its output before a run, and restores it afterwards.

`restored` covers a model's parameters, buffers and modules: their attributes, the containers directly in these, and the
tensors and random generators in either.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from nandoctor.engine.kept_memory import tensors_kept

Undo = Callable[[], object]
_CONTAINERS = (dict, OrderedDict, list, deque, set)


@contextmanager
def restored(model: nn.Module) -> Iterator[tuple[Sequence[torch.Tensor], Callable[[torch.Tensor], bool]]]:
    """Restore weights and buffers, written in place or replaced, and the other state that a forward changes.

    It yields the tensors that the model holds, and a function that tells which were not written to. State in files'
    globals, in closures, in caches of functions and deeper in objects is not covered.
    """
    found = _State(model)
    with ExitStack() as stack:
        is_unwritten = stack.enter_context(tensors_kept(found.tensors))
        for undo in found.undo:
            stack.callback(undo)
        yield found.tensors, is_unwritten


class _State:
    """The tensors that a model holds, each once, and how to restore everything else."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.undo: list[Undo] = []
        self._seen: dict[int, Any] = {}  # with the values, since the id of a deleted one may be reused
        self._waiting: list[nn.Module] = []
        self._keep(model)
        while self._waiting:
            self._keep_module(self._waiting.pop())

    def _keep_module(self, module: nn.Module) -> None:
        attributes, kind = vars(module), type(module)
        self.undo.append(partial(_put_back_module, module, kind, dict(attributes)))
        if isinstance(module, torch.jit.ScriptModule):  # it keeps its tensors in C++
            for tensor in (*module.parameters(), *module.buffers()):
                self._keep(tensor)
        for value in list(attributes.values()):
            self._keep(value)
            if type(value) in _CONTAINERS:
                self._keep_container(value)

    def _keep_container(self, container: Any) -> None:
        saved = container.copy()
        self.undo.append(partial(_put_back, container, saved))
        for value in saved.values() if isinstance(saved, dict) else saved:
            self._keep(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        if _is(value, torch.Tensor):
            self._seen[id(value)] = value
            if hasattr(type(value), "__tensor_flatten__"):  # a wrapper, whose parts hold the memory
                for name in value.__tensor_flatten__()[0]:
                    self._keep(getattr(value, name))
            else:
                self.tensors.append(value)
        elif _is(value, nn.Module):
            self._seen[id(value)] = value
            self._waiting.append(value)
        elif (undo := _undo_draws(value)) is not None:
            self._seen[id(value)] = value
            self.undo.append(undo)


def _is(value: Any, kind: type) -> bool:
    """Return True if the value's own type is this one; `isinstance` would ask the value, which may be a proxy."""
    return issubclass(type(value), kind)


def _put_back_module(module: nn.Module, kind: type, saved: dict[str, Any]) -> None:
    if type(module) is not kind:  # a lazy module becomes another one
        object.__setattr__(module, "__class__", kind)
    _put_back(vars(module), saved)


def _put_back(container: Any, saved: Any) -> None:
    """Give a container its items again, in their order."""
    keys_are_same = not isinstance(saved, dict) or (
        len(saved) == len(container) and all(map(is_, saved.keys(), container.keys()))
    )
    now, before = (list(it.values()) if isinstance(it, dict) else list(it) for it in (container, saved))
    if keys_are_same and len(now) == len(before) and all(map(is_, now, before)):
        return
    container.clear()
    (container.extend if isinstance(saved, (list, deque)) else container.update)(saved)


def _undo_draws(value: Any) -> Undo | None:
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
