"""Finds every tensor in a model's arguments and outputs, in any container or object."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

from nandoctor.dumps.packing import slots_of
from nandoctor.tracing.tensor_stats import format_of, numbers_in

_MAX_NESTING = 8
_MAX_OBJECTS = 2000
"""Objects with attributes in one value: a result holds a handful, and a search that finds more has left it."""

# Types that hold no tensor of the step. A module's weights are read as the model's state.
_WITHOUT_TENSORS = (
    *(type(None), bool, int, complex, str, bytes, bytearray, range, slice, type(...), enum.Enum, PurePath),
    *(type, types.ModuleType, weakref.ref, np.dtype, np.random.Generator, nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
)
_NUMPY_FLOATS = "efdFD"  # those that torch has as well


def walk_tensors(value: Any, *, attributes: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested containers, numpy arrays and, with `attributes`, what any other object refers to.

    Each comes with its place ("", "[0]", "logit", "hidden[2]"). Generators are not consumed: the model's caller still
    needs them.
    """
    walk = _Walk(attributes=attributes)
    return ((place, leaf) for place, leaf in walk.leaves(value) if isinstance(leaf, torch.Tensor))


def list_unread(value: Any) -> tuple[str, ...]:
    """Return the places in `value` that may hold numbers but cannot be read, each with what is there.

    A plain number that is NaN or infinite is one: it may have been a tensor, and no op is known to have made it.
    """
    found = ((place, _describe_unread(leaf)) for place, leaf in _Walk(attributes=True).leaves(value))
    return tuple(f"{place} ({what})" if place else what for place, what in found if what)


def _describe_unread(leaf: torch.Tensor | str) -> str:
    """Return what hides the numbers of a leaf, "" if it can be read or has none."""
    if isinstance(leaf, str):
        return leaf
    has_values = format_of(leaf.dtype) is not None and leaf.numel() > 0
    return f"a {type(leaf).__name__}" if has_values and (leaf.is_meta or numbers_in(leaf) is None) else ""


class _Walk:
    """One walk through a value; an object with attributes is entered once.

    Its leaves are tensors, and a text for each value that cannot be read.
    """

    def __init__(self, *, attributes: bool) -> None:
        self._attributes = attributes
        self._entered: dict[int, Any] = {}  # the values keep objects alive, so no id is reused

    def leaves(self, value: Any, place: str = "", nesting: int = 0) -> Iterator[tuple[str, torch.Tensor | str]]:
        leaf = _as_leaf(value)
        if leaf is not None:
            yield place, leaf
            return
        items = self._items(value)
        if items is None:
            if self._attributes:
                yield place, f"a {type(value).__name__}"
        elif nesting < _MAX_NESTING:
            for step, item in items:
                yield from self.leaves(item, (place + step).removeprefix("."), nesting + 1)
        elif items:
            yield place, "nested too deeply"

    def _items(self, value: Any) -> list[tuple[str, Any]] | None:
        """Return what is in a value, [] if it holds no tensor and None if it cannot be read."""
        if isinstance(value, (*_WITHOUT_TENSORS, float)):
            return []
        contained = _contained(value)
        if contained is not None:
            return contained
        if not self._attributes or id(value) in self._entered:
            return []
        self._entered[id(value)] = value
        return None if len(self._entered) > _MAX_OBJECTS else _references_of(value)


def _as_leaf(value: Any) -> torch.Tensor | str | None:
    """Return the value as a leaf if it holds numbers, else None."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.char in _NUMPY_FLOATS:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    if isinstance(value, (float, np.floating)) and not math.isfinite(value):
        return f"the plain number {value}"
    return None


def _contained(value: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a container, or None if it is none."""
    if isinstance(value, Mapping):
        return [(f".{key}", item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Set):
        return [(f"{{{index}}}", item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return None


def _references_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return what an object refers to (attributes, slots, closures), None if it hides that. No property is run."""
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closed = [(f".{name}", cell.cell_contents) for name, cell in cells if cell != types.CellType()]
        return [*closed, (".defaults", value.__defaults__), (".defaults", value.__kwdefaults__)]
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return [(".__self__", value.__self__)]
    names = slots_of(type(value))
    if not names and not hasattr(value, "__dict__"):
        own_code = type(value).__module__.partition(".")[0] not in sys.stdlib_module_names
        return None if own_code or isinstance(value, Iterable) else []
    found = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
    return [(f".{name}", item) for name, item in found.items()]
