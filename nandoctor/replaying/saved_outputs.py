"""Finds the outputs that a dump saved, and the one of them that a replay is compared with.

In: a `Dump`, its model and the settings. Out: `SavedOutputs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.array_roles import role_of
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.numpy_pickle import comparable_values
from nandoctor.errors import DumpError
from nandoctor.replaying.input_binding import required_names
from nandoctor.replaying.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOutputs:
    """The `names` of the arrays that do not go in, and the one to compare with, by its name.

    `field` is the user's name for the field of the model's output that it belongs to, or its exact place there where
    the recorder noted that. `perhaps` are arrays whose names a function of the user reads, of the batch or of the
    output: one is taken for an output only where the replay agrees with it.
    """

    names: tuple[str, ...]
    graded: tuple[str, torch.Tensor] | None = None
    field: str | None = None
    perhaps: tuple[tuple[str, torch.Tensor], ...] = ()

    @property
    def array(self) -> torch.Tensor | None:
        """The saved array to compare with; None where there is none, or a single number alone."""
        return self.graded[1] if self.graded is not None and self.graded[0] in self.names else None


def find_outputs(
    dump: Dump, model: nn.Module, settings: Settings, functions: Collection[Callable[..., Any] | None]
) -> SavedOutputs:
    """The saved outputs; what the user's `functions` read by its name is an input of theirs.

    Raises:
        DumpError: the settings name an output that is not there.
    """
    taken = {*required_names(model), *(item.rpartition("=")[2] for item in settings.inputs)}
    if dump.recorded is not None and settings.output is None:
        names = _recorded_outputs(dump.arrays)
        first = next((name for name in names if not is_finite_array(dump.arrays[name])), next(iter(names), None))
    else:
        read = {text for function in functions for text in _texts_in(function)}
        inside = {name for name in dump.arrays if name.rpartition(".")[2] in read}  # a container's own names
        names = saved_outputs(dump.arrays, settings.output, taken=taken, read={*read, *inside})
        first = next(iter(names), None)
    if first is None:
        perhaps = () if dump.recorded is not None else tuple(_unknown_nonfinite(dump.arrays, taken))
        return SavedOutputs(names=tuple(names), graded=_saved_number(dump), field=settings.output, perhaps=perhaps)
    place = settings.output or (_place_of(first) if dump.recorded is not None else None)
    return SavedOutputs(names=tuple(names), graded=(first, dump.arrays[first]), field=place)


def saved_outputs(
    arrays: Mapping[str, torch.Tensor],
    key: str | None,
    *,
    taken: Collection[str] = (),
    read: Collection[str] = (),
) -> list[str]:
    """The names of the arrays that are saved outputs, the one to grade against first.

    `key` is the user's word. Else they go by their names, those that hold non-finite values first; failing that, a
    floating-point array of no known role that holds some is taken for one: a training script saves its dump because of
    it. What the model has `taken` by its name is none, nor is one of no known role that the user's functions `read`.

    Raises:
        DumpError: `key` names no array, nor a likely field of the model's output beside a saved one.
    """
    named = [name for name in arrays if role_of(name) == "output" and name not in taken]
    named.sort(key=lambda name: is_finite_array(arrays[name]))
    if key is not None and key in arrays:
        return [key, *(name for name in named if name != key)]
    if key is not None and not named:
        raise DumpError(
            f"The dump has no array {key!r}.",
            remedy=f"--output takes the name of the saved output: {', '.join(arrays) or '(there are no arrays)'}.",
        )
    if named:
        return named
    return [name for name, _ in _unknown_nonfinite(arrays, {*taken, *read})]


def _unknown_nonfinite(
    arrays: Mapping[str, torch.Tensor], known: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in arrays.items():
        if role_of(name) == "unknown" and name not in known and not is_finite_array(array):
            yield name, array


def _recorded_outputs(arrays: Mapping[str, torch.Tensor]) -> list[str]:
    """What the recorder saved as output, the largest array of floating-point numbers first."""
    names = [name for name in arrays if name.partition(".")[0] == "output"]
    return sorted(names, key=lambda name: (not arrays[name].is_floating_point(), -arrays[name].numel()))


def is_finite_array(array: torch.Tensor) -> bool:
    """Tell whether all stored values are finite; those of integers are."""
    values = comparable_values(array)
    return not values.is_floating_point() or bool(torch.isfinite(values).all())


def _saved_number(dump: Dump) -> tuple[str, torch.Tensor] | None:
    """A saved output or loss of a single number, where no array was saved: one that is non-finite before others."""
    if dump.recorded is not None:
        return None
    outputs = {name: value for name, value in dump.scalars.items() if isinstance(value, float)}
    outputs = {name: value for name, value in outputs.items() if role_of(name) == "output"} | dump.losses
    named = sorted(outputs.items(), key=lambda item: math.isfinite(item[1]))
    return (named[0][0], torch.tensor(named[0][1], dtype=torch.float64)) if named else None


def _place_of(name: str) -> str:
    """Where in the model's output an array is that the recorder named: "output.boxes.0" is at "boxes[0]"."""
    parts = name.split(".")[1:]
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts).removeprefix(".")


def _texts_in(function: Callable[..., Any] | None) -> Iterator[str]:
    """The texts written in a function, and so the names of the arrays that it reads."""
    waiting = [getattr(function, "__code__", None)]
    while waiting:
        constants = getattr(waiting.pop(), "co_consts", ())
        yield from (constant for constant in constants if isinstance(constant, str))
        waiting += [constant for constant in constants if isinstance(constant, CodeType)]
