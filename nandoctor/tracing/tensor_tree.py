"""Finds every tensor in a model's arguments and outputs, in any container or object."""

from __future__ import annotations

import enum
import functools
import math
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

from nandoctor.tracing.tensor_stats import format_of, numbers_in
from nandoctor.trees import BEYOND, Parts, attributes, once, parts, spell, walk

# Types that hold no tensor of the step. A module's weights are read as the model's state.
_WITHOUT_TENSORS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...), enum.Enum, PurePath),
    *(type, types.ModuleType, weakref.ref, np.dtype, np.ndarray, np.generic, np.random.Generator, nn.Module),
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
)
_NUMPY_FLOATS = "efdFD"  # those that torch has as well


def walk_tensors(value: Any, *, attributes: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested containers, numpy arrays and, with `attributes`, what any other object refers to.

    Each comes with its place ("", "[0]", "logit", "hidden[2]"). Generators are not consumed: the model's caller still
    needs them.
    """
    for place, item in walk(value, once(_references) if attributes else parts):
        if isinstance(item, torch.Tensor):
            yield spell(place), item
        elif isinstance(item, np.ndarray) and item.dtype.char in _NUMPY_FLOATS:
            yield spell(place), torch.from_numpy(np.array(item, dtype=item.dtype.newbyteorder("=")))


def list_unread(value: Any) -> tuple[str, ...]:
    """Return the places in `value` that may hold numbers but cannot be read, each with what is there.

    A plain number that is NaN or infinite is one: it may have been a tensor, and no op is known to have made it.
    """
    found = ((spell(place), _describe_unread(item)) for place, item in walk(value, once(_references)))
    return tuple(f"{place} ({what})" if place else what for place, what in found if what)


def _describe_unread(item: Any) -> str:
    """Return what hides the numbers of an item, "" if it can be read or has none."""
    if item is BEYOND:
        return "nested too deeply, or one of too many"
    if isinstance(item, torch.Tensor):
        has_values = format_of(item.dtype) is not None and item.numel() > 0
        return f"a {type(item).__name__}" if has_values and (item.is_meta or numbers_in(item) is None) else ""
    if isinstance(item, (float, np.floating)) and not math.isfinite(item):
        return f"the plain number {item}"
    return "" if isinstance(item, _WITHOUT_TENSORS) or _references(item) is not None else f"a {type(item).__name__}"


def _references(value: Any) -> Parts | None:
    """Return what a value refers to (items, attributes, closures), None if it holds no tensors or hides what it holds.

    No property is run.
    """
    if isinstance(value, _WITHOUT_TENSORS):
        return None
    inside = parts(value)
    if inside is not None:
        return inside
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closed = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
        return {**closed, "defaults": (value.__defaults__, value.__kwdefaults__)}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return {"__self__": value.__self__}
    stored = attributes(value)
    return stored if stored or not _may_hide(value) else None


def _may_hide(value: Any) -> bool:
    """Return True for an object without attributes that may hold numbers all the same, such as an iterator."""
    if hasattr(value, "__dict__"):
        return False
    own_code = type(value).__module__.partition(".")[0] not in sys.stdlib_module_names
    return own_code or isinstance(value, Iterable)
