"""Objects among a model's arguments are made again as they were, or the recorder says that they cannot be."""

import argparse
import enum
import functools
import pathlib
import sys
import types
from collections import OrderedDict, UserDict
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import nandoctor
from nandoctor.step.argument_objects import NotDescribableError, describe_argument, make_argument


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


@dataclass
class Settings:
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


@dataclass(frozen=True, slots=True)
class Slotted:
    part: Any = Part.NORM
    paths: tuple[Path, ...] = (Path("a"), Path("torch.b"))
    dtype: torch.dtype = torch.bfloat16


class CFG:
    width = 3


class Plain:
    def __init__(self) -> None:
        self.width = 3


@dataclass
class Called:
    width: int = 3

    def __call__(self) -> int:
        return self.width


def len_of(value):
    return len(value)


def remade(value):
    """What a replay in this process would make of the argument."""

    def find(source):
        return getattr(pathlib if source["module"] == "pathlib" else sys.modules[source["module"]], source["name"])

    return make_argument(
        describe_argument(value, lambda kind: {"module": kind.__module__, "name": kind.__name__}), find
    )


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
        *(3, "x", None, [1, (2.0, True)], {True: 1, 2: Part.NORM}, CFG, len_of),
        *(Settings(None, None), Doubled(4), Derived(3, 9), Slotted((Settings(),))),
        *(types.SimpleNamespace(a=[1]), argparse.Namespace(width=3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_argument_is_remade_as_it_was_stored(value):
    made = remade(value)
    assert type(made) is type(value)
    assert made == value


@pytest.mark.parametrize(
    "value",
    [
        *(Plain(), Called(), {1}, OrderedDict(a=1), UserDict(a=1), functools.partial(len, [1]), torch.ones(1)),
        *([Plain()], {Letter.X: 1}, Settings(drop=Plain())),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_need_a_builder(value):
    with pytest.raises(NotDescribableError):
        remade(value)


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
