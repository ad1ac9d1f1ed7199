"""Finds every tensor in what a model takes or gives, whatever holds it."""

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

from nandoctor.tracing.tensor_stats import format_of, numbers_in

_MAX_NESTING = 8
_MAX_OBJECTS = 2000
"""Objects with attributes in one value: a result holds a handful, whatever holds more leads out of the result."""

# Without a tensor of the step in them: a module holds weights, which are looked at as the model's state.
_WITHOUT_TENSORS = (
    *(type(None), bool, int, complex, str, bytes, bytearray, range, slice, type(...), enum.Enum, PurePath),
    *(type, types.ModuleType, weakref.ref, np.dtype, np.random.Generator, nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
)
_NUMPY_FLOATS = "efdFD"  # the kinds that torch has as well


def walk_tensors(value: Any, *, attributes: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested containers, arrays of numpy and, with `attributes`, what any other object refers to.

    Each comes with its place ("", "[0]", "logit", "hidden[2]"). Generators are not consumed: the model's caller still
    needs them.
    """
    walk = _Walk(attributes=attributes)
    return ((place, leaf) for place, leaf in walk.leaves(value) if isinstance(leaf, torch.Tensor))


def list_unread(value: Any) -> tuple[str, ...]:
    """The places in `value` that may hold numbers and cannot be looked into, each with what is there.

    So is a plain number that is NaN or infinite: it may have been a tensor, and no op is known to have made it.
    """
    found = ((place, _closed(leaf)) for place, leaf in _Walk(attributes=True).leaves(value))
    return tuple(f"{place} ({what})" if place else what for place, what in found if what)


def _closed(leaf: torch.Tensor | str) -> str:
    """What hides the numbers of a leaf, "" for one that can be read or has none."""
    if isinstance(leaf, str):
        return leaf
    has_values = format_of(leaf.dtype) is not None and leaf.numel() > 0
    return f"a {type(leaf).__name__}" if has_values and (leaf.is_meta or numbers_in(leaf) is None) else ""


class _Walk:
    """One walk through a value; an object with attributes is entered once.

    Its leaves are tensors, and of what cannot be looked into a text that says what that is.
    """

    def __init__(self, *, attributes: bool) -> None:
        self._attributes = attributes
        self._entered: dict[int, Any] = {}  # kept alive, for an id is the next object's when its owner is gone

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
        """What is in a value, () for what holds no tensor and None for what cannot be looked into."""
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
    """The value itself where it is numbers."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.char in _NUMPY_FLOATS:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    if isinstance(value, (float, np.floating)) and not math.isfinite(value):
        return f"the plain number {value}"
    return None


def _contained(value: Any) -> list[tuple[str, Any]] | None:
    """The items of a container; None where it is none."""
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
    """What an object refers to: attributes, slots, a function's closure and defaults. A property would run code."""
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closed = [(f".{name}", cell.cell_contents) for name, cell in cells if cell != types.CellType()]
        return [*closed, (".defaults", value.__defaults__), (".defaults", value.__kwdefaults__)]
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return [(".__self__", value.__self__)]
    names = _slots(value)
    if not names and not hasattr(value, "__dict__"):
        own_code = type(value).__module__.partition(".")[0] not in sys.stdlib_module_names
        return None if own_code or isinstance(value, Iterable) else []
    found = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
    return [(f".{name}", item) for name, item in found.items()]


def _slots(value: Any) -> list[str]:
    """The names of an object's slots, as an attribute has them: a private one goes by its class."""
    names = []
    for kind in type(value).__mro__:
        own = vars(kind).get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{kind.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
