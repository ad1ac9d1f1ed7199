"""Objects among a model's arguments are made again as they were, or the recorder says that they cannot be."""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

import nandoctor
from nandoctor.replaying.argument_objects import NotDescribableError, describe_argument, make_argument


class Part(enum.Flag):
    BIAS = 1
    NORM = 2


class Open(enum.Flag, boundary=enum.KEEP):
    FIRST = 1


class Letter(str, enum.Enum):  # noqa: UP042  (its str is not its value)
    X = "x"


class Pair(enum.Enum):
    P = (1, "p")

    def __init__(self, number: int, name: str) -> None:
        self.number = number


class Keyed:
    """It shows only the fields that have a value."""

    def keys(self):
        return [name for name, value in vars(self).items() if value is not None]

    def __getitem__(self, name):
        return getattr(self, name)


@dataclass
class KeyedConfig(Keyed):
    drop: float | None = 0.5
    scale: float | None = 7.0


@dataclass(frozen=True)
class Doubled:
    width: int = 3
    kept: int = field(init=False, default=5)

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", 2 * self.width)


@dataclass
class Derived:
    width: int
    more: InitVar[int] = 4
    total: int = field(init=False)

    def __post_init__(self, more: int) -> None:
        self.total = self.width + more


class Lying:
    def __init__(self) -> None:
        self.width = 3

    def __getattribute__(self, name: str) -> Any:
        return 7 if name in ("width", "__dict__") else object.__getattribute__(self, name)


class Slots:
    __slots__ = ("__hidden", "unset", "width")

    def __init__(self) -> None:
        self.width, self.__hidden = 3, Part.NORM


class SlotsAndMore(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.more = [Part.BIAS | Part.NORM]


class Hiding(dict):
    """It shows only the items that have a value."""

    def keys(self):
        return [key for key, value in super().items() if value is not None]

    def __iter__(self):
        return iter(self.keys())

    def items(self):
        return [(key, self[key]) for key in self.keys()]


class Empty(list):
    def __iter__(self):
        return iter(())


class WithScale(dict):
    def __init__(self, items, scale=1):
        super().__init__(items)
        self.scale = scale


class Growing(dict):
    def __init__(self, items):
        super().__init__({key: 2 * value for key, value in items.items()})


class Increasing(NamedTuple("Increasing", [("first", int), ("second", int)])):
    def __new__(cls, first, second=2):
        return super().__new__(cls, first, second + 1)


class View(Mapping):
    def __init__(self, items, default=None):
        self.held, self.default = items, default

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return (key for key, value in self.held.items() if value is not None)

    def __len__(self):
        return len(list(iter(self)))


class Bag(UserDict):
    pass


def with_attribute(made, name="more"):
    setattr(made, name, None)
    return made


def ordered():
    made = OrderedDict(a=1, b=2)
    made.move_to_end("a")
    return made


def remade(value):
    """What a replay in this process would make of the argument."""

    def find(source):
        return getattr(sys.modules[source["module"]], source["name"])

    return make_argument(
        describe_argument(value, lambda kind: {"module": kind.__module__, "name": kind.__name__}), find
    )


def parts_of(value):
    """All that an object holds, below whatever its class shows."""
    names = [name for kind in type(value).__mro__ for name, item in vars(kind).items() if "member_desc" in repr(item)]
    slots = {name: object.__getattribute__(value, name) for name in names if name != "unset"}
    kept = object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {}
    items = [kind.__repr__(value) for kind in (OrderedDict, dict, list, tuple) if isinstance(value, kind)][:1]
    return type(value), slots, kept, items


@pytest.mark.parametrize(
    "value", [Part.BIAS | Part.NORM, Part(0), Part.NORM, Open(9), Letter.X, Pair.P, enum.IntFlag("Way", "UP IN")(3)]
)
def test_members_of_an_enum_are_the_same_ones(value, monkeypatch):
    monkeypatch.setitem(globals(), type(value).__name__, type(value))
    monkeypatch.setattr(type(value), "__module__", __name__)
    assert remade(value) is value


@pytest.mark.parametrize(
    "value",
    [
        KeyedConfig(None, None),
        Doubled(4),
        Derived(3, 9),
        Lying(),
        Slots(),
        SlotsAndMore(),
        WithScale({"a": 1}),
        View({"a": 1}),
        Bag(a=1),
        types.SimpleNamespace(a=[1]),
        ordered(),
        {True: 1, 2: Part.NORM},
        {1, 0, 8, 16},
        {16, 8, 1, 0},
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_is_remade_whatever_its_class_shows(value):
    assert parts_of(remade(value)) == parts_of(value)


@pytest.mark.parametrize(
    "value",
    [
        WithScale({"a": 1}, scale=3),
        Hiding(a=None, b=1),
        Empty([1, 2]),
        Growing({"a": 1}),
        Increasing(1, 1),
        View({"a": None, "b": 2}),
        View({"a": 1}, default=5),
        with_attribute(Bag(a=1)),
        with_attribute(Empty([1])),
        {Letter.X: 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_be_another_object_is_not_described(value):
    with pytest.raises(NotDescribableError):
        remade(value)


def test_objects_of_other_libraries_keep_their_fields():
    pydantic, attr = pytest.importorskip("pydantic"), pytest.importorskip("attr")
    kinds = [
        pydantic.create_model("Model", __module__=__name__, width=(int, 3), other=(Any, None)),
        attr.make_class("Attrs", ["width", "other"], slots=True),
        attr.make_class("Attrs", ["width", "other"], frozen=True),
    ]
    for kind in kinds:
        kind.__module__ = __name__
        value, kinds_by_name = kind(width=4, other=[None]), {kind.__name__: kind, "set": set}
        described = describe_argument(value, lambda kind: {"name": kind.__name__})
        made = make_argument(described, lambda source, known=kinds_by_name: known[source["name"]])
        assert (type(made), made.width) == (kind, 4)
        assert made == value


SCRIPT = """
import enum
import torch
from dataclasses import dataclass

class Part(enum.Flag):
    BIAS = 1
    NORM = 2

@dataclass
class Config:
    part: Part = Part.BIAS

class Net(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert type(config) is Config
        self.config = config
        self.linear = torch.nn.Linear(2, 2, bias=Part.NORM in config.part)

    def forward(self, x):
        return self.linear(x) / 0
"""


def test_a_script_has_one_class_for_the_model_and_its_config(tmp_path, monkeypatch):
    (tmp_path / "script_with_config.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    script = __import__("script_with_config")
    for thing in (script.Part, script.Config, script.Net):
        thing.__module__ = "__main__"  # as in a training that is started from this file
    monkeypatch.setitem(sys.modules, "__main__", script)
    model = script.Net(script.Config(script.Part.BIAS | script.Part.NORM))
    with nandoctor.Recorder(model, folder=tmp_path) as recorder:
        recorder.watch(model(torch.ones(1, 2)).sum(), torch.zeros(1))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("script_with_config", None)
    assert nandoctor.replay(recorder.written[0], fixes=False).report.reproduction.grade == "exact"
