"""Whatever Python objects a model holds, a run neither fails on them nor leaves a change in them."""

from __future__ import annotations

import builtins
import functools
import random
import sys
import weakref
from array import array
from collections import ChainMap, OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from nandoctor.replaying import kept_state
from nandoctor.replaying.kept_state import restored


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self):
        self.count = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    count: int = 0


class Called:
    count = 0

    def __call__(self):
        self.count += 1


class ReadOnlyDict(dict):
    def _refuse(self, *_):
        raise TypeError("read only")

    __setitem__ = update = clear = __iter__ = _refuse


class ReadOnlyList(list):
    def _refuse(self, *_):
        raise TypeError("read only")

    append = extend = clear = __iter__ = _refuse


def hold(**items):
    model = nn.Linear(2, 2)
    vars(model).update(items)
    return model


def masked():
    return np.ma.array([1.0, 2.0], mask=[False, True])


def moved():
    table = OrderedDict(a=1, b=2)
    table.move_to_end("a")
    return table


CHANGES = {
    "slots": (Slotted, lambda it: setattr(it, "count", 1), lambda it: it.count == 0),
    "unset slot": (Slotted, lambda it: setattr(it, "unset", 1), lambda it: not hasattr(it, "unset")),
    "frozen dataclass": (Frozen, lambda it: object.__setattr__(it, "count", 1), lambda it: it.count == 0),
    "callable object": (Called, lambda it: it(), lambda it: it.count == 0),
    "order": (moved, lambda it: it.move_to_end("b"), lambda it: list(it) == ["b", "a"]),
    "order of another change": (moved, lambda it: it.update(c=1), lambda it: list(it) == ["b", "a"]),
    "read-only dict": (ReadOnlyDict, lambda it: dict.update(it, a=1), lambda it: len(it) == 0),
    "read-only list": (ReadOnlyList, lambda it: list.append(it, 1), lambda it: len(it) == 0),
    "bytes": (lambda: bytearray(b"ab"), lambda it: it.__setitem__(0, 0), lambda it: it == b"ab"),
    "numbers": (lambda: array("f", [1]), lambda it: it.append(2), lambda it: list(it) == [1]),
    "objects in an array": (
        lambda: np.array([1, [2]], dtype=object),
        lambda it: (it.__setitem__(0, 5), it[1].append(3)),
        lambda it: it.tolist() == [1, [2]],
    ),
    "mask": (masked, lambda it: it.mask.fill(True), lambda it: it.mask.tolist() == [False, True]),
    "namespace": (lambda: SimpleNamespace(a=[]), lambda it: it.a.append(1), lambda it: it.a == []),
    "user dict": (UserDict, lambda it: it.update(a=1), lambda it: not it),
    "chain of dicts": (ChainMap, lambda it: it.update(a=1), lambda it: not it),
    "partial": (lambda: functools.partial(print, []), lambda it: it.args[0].append(1), lambda it: it.args == ([],)),
    "shrunk memory": (
        lambda: torch.ones(4),
        lambda it: it.untyped_storage().resize_(0),
        lambda it: it.untyped_storage().nbytes() == 16 and bool((it == 1).all()),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_an_object_is_undone(kind):
    make, change, is_as_it_was = CHANGES[kind]
    held = make()
    with restored(hold(held=held)):
        change(held)
        assert not is_as_it_was(held)
    assert is_as_it_was(held)


class Evasive:
    """A proxy that cannot be asked for anything."""

    def __getattribute__(self, name):
        raise RuntimeError(name)


class Propertied:
    @property
    def __dict__(self):
        raise RuntimeError


class Sealed(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_):
        raise RuntimeError("sealed")


def gone():
    return weakref.proxy(nn.Linear(1, 1))


@pytest.mark.parametrize(
    "make", [Evasive, Propertied, gone, random.SystemRandom, lambda: torch.ones(2).as_subclass(Sealed)]
)
def test_objects_that_refuse_to_be_looked_at_are_left(make):
    model = hold(held=make(), count=0)
    with restored(model):
        model.count = 1
    assert model.count == 0


def test_a_weak_collection_does_not_get_back_what_is_gone():
    key = nn.Linear(1, 1)
    model = hold(table=weakref.WeakKeyDictionary({key: 1}))
    with restored(model):
        del key
    assert len(model.table) == 0


@pytest.mark.parametrize("first", [None, torch.ones(2)], ids=["none", "some"])
def test_gradients_of_the_user_stay(first):
    model = hold()
    model.bias.grad = first
    with restored(model):
        model(torch.ones(2)).sum().backward()
    assert model.bias.grad is first
    assert first is None or torch.equal(first, torch.ones(2))


def test_weights_are_kept_whatever_else_there_is():
    many = nn.Sequential(hold(vocabulary=[(index,) for index in range(250_000)]), nn.BatchNorm1d(2))
    with restored(many):
        many[1].running_mean += 1
    assert not many[1].running_mean.any()


def test_hooks_and_attributes_of_any_number_of_layers(monkeypatch):
    monkeypatch.setattr(kept_state, "_MOST_VALUES", 0)
    layers = nn.Sequential(hold(), hold())
    with restored(layers):
        layers[1].register_forward_pre_hook(print)
        layers[1].eps = 1.0
    assert not layers[1]._forward_pre_hooks
    assert not hasattr(layers[1], "eps")


def test_layers_that_refer_to_one_another_need_no_recursion():
    layers = nn.ModuleList(hold() for _ in range(400))
    for layer, following in zip(layers, list(layers)[1:], strict=False):
        vars(layer)["following"] = [following]
    with restored(layers):
        layers[399].bias.data.zero_()
    assert layers[399].bias.any()


class SealedKind(type):
    def __setattr__(cls, *_):
        raise TypeError

    __delattr__ = __setattr__


class Tabled(nn.Module, metaclass=SealedKind):
    count = 0
    rng = np.random.default_rng(0)

    @staticmethod
    @functools.lru_cache
    def table(size):
        return torch.zeros(size)


def test_what_a_class_has_is_as_it_was():
    model, first = Tabled(), np.random.default_rng(0).random()
    with restored(model):
        Tabled.table(3)
        Tabled.rng.random()
        type.__setattr__(Tabled, "count", 1)
        type.__setattr__(Tabled, "late", 1)
    assert Tabled.table.cache_info().currsize == 0
    assert Tabled.rng.random() == first
    assert (Tabled.count, hasattr(Tabled, "late")) == (0, False)


@pytest.mark.parametrize("table", [vars(builtins), sys.modules], ids=["builtins", "modules"])
def test_what_belongs_to_the_interpreter_is_left(table, monkeypatch):
    """A file refers to the builtins by `__builtins__`; a library that a forward imports may add to them."""
    monkeypatch.setitem(table, "added_before", None)
    with restored(Tabled()), restored(hold(table=table)):
        monkeypatch.setitem(table, "added_by_the_run", None)
    assert {"added_before", "added_by_the_run"} <= table.keys()
    assert builtins.len is len
