"""Walks nested containers and objects, and makes them again with other parts."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from types import MemberDescriptorType
from typing import Any

MAX_DEPTH = 64
"""Containers within one another: recursive U-Nets nest modules 30 deep, and Python's own recursion ends at 1000."""
MAX_CONTAINERS = 100_000
"""Containers and objects in one value; a search that finds more has left it for the program around it."""
BEYOND = object()
"""Stands in a walk for what is in a container that is nested too deeply, or is one of too many."""

PLAIN: tuple[type[Any], ...] = (bool, int, float, complex, str, type(None))
"""The types of plain values, which have no parts."""
Parts = Mapping[Any, Any]
Place = tuple[Any, ...]
"""The keys, indexes and names that lead to a part, from the outermost one."""


def parts(value: Any) -> Parts | None:
    """Return the parts of a container by key, index or field name; None for any other value."""
    if type(value) in PLAIN:  # most of what is in a container
        return None
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple, deque, Set)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return None


def attributes(value: Any) -> dict[str, Any]:
    """Return what the `__dict__` and the slots of an object hold, whatever its class's own `__getstate__` says."""
    state: Any = object.__getstate__(value)  # None without any, a pair with slots
    held, slots = state if isinstance(state, tuple) else (state, None)
    return {**(slots or {}), **(held or {})}


def rebuilt(value: Any, changed: Parts) -> Any:
    """Return a container like this one with other parts; a mapping that refuses them becomes a dict."""
    kind = type(value)
    if kind is dict:
        return dict(changed)
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(kind, changed.values())
    if isinstance(value, (list, tuple, deque, Set)):
        return kind(list(changed.values()))
    return made_of(kind, attributes(value) | dict(changed))


def _rebuilt_mapping(value: Mapping[Any, Any], changed: Parts) -> Any:
    """Return a copy that keeps the class's own attributes, such as the factory of a defaultdict."""
    try:
        made: Any = copy.copy(value)
        for key, part in changed.items():
            made[key] = part
    except Exception:  # a class of the user's, which may refuse anything
        return dict(changed)
    return made


def made_of(kind: type[Any], stored: Mapping[str, Any]) -> Any:
    """Return an object of the class that holds these attributes and slots; no code of the class is run."""
    made = object.__new__(kind)
    of_slots = (item for base in reversed(kind.__mro__) if "__slots__" in vars(base) for item in vars(base).items())
    slots = {name: item for name, item in of_slots if isinstance(item, MemberDescriptorType)}  # private ones mangled
    held = object.__getattribute__(made, "__dict__") if kind.__dictoffset__ else {}
    for name, value in stored.items():
        if name in slots:
            slots[name].__set__(made, value)
        else:
            held[name] = value  # even if the class has a property of that name
    return made


def walk(value: Any, parts_of: Callable[[Any], Parts | None] = parts) -> Iterator[tuple[Place, Any]]:
    """Yield a value and everything in it with its place, from the outside in and in order.

    `parts_of` decides what is entered. Where the limits of depth and number end the walk, it yields `BEYOND`.
    """
    num_entered = 0
    waiting: list[Iterator[tuple[Place, Any]]] = [iter([((), value)])]  # the parts of each container that is entered
    while waiting:
        if (found := next(waiting[-1], None)) is None:
            waiting.pop()
            continue
        yield found
        place, item = found
        inside = parts_of(item)
        if not inside:
            continue
        num_entered += 1
        if len(place) >= MAX_DEPTH or num_entered > MAX_CONTAINERS:
            yield place, BEYOND
        else:
            waiting.append(_beneath(place, inside))


def _beneath(place: Place, inside: Parts) -> Iterator[tuple[Place, Any]]:
    return (((*place, key), part) for key, part in inside.items())


def once(parts_of: Callable[[Any], Parts | None]) -> Callable[[Any], Parts | None]:
    """Return `parts_of` for one walk through objects that refer to one another: each is entered at its first place."""
    entered: dict[int, Any] = {}  # the values keep objects alive, so no id is reused

    def parts_once(value: Any) -> Parts | None:
        if id(value) in entered:
            return None
        entered[id(value)] = value
        return parts_of(value)

    return parts_once


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the nested container with `change` applied to every part; see `placed_map`."""
    return placed_map(lambda _, part: change(part), tree)


def placed_map(change: Callable[[Place, Any], Any], tree: Any) -> Any:
    """Return the nested container with `change(place, part)` in place of every part, itself included.

    A container for which `change` returns that very container is made again of its changed parts. One that stands at
    several places is made once.

    Raises:
        RecursionError: it is nested deeper than `MAX_DEPTH`, or holds itself.
    """
    made: dict[int, tuple[Any, Any]] = {}  # with the containers themselves, so that no id is reused

    def visit(place: Place, item: Any) -> Any:
        changed = change(place, item)
        inside = parts(item) if changed is item else None
        if inside is None:
            return changed
        if len(place) >= MAX_DEPTH:  # also if it holds itself
            raise RecursionError("a container is nested too deeply")
        if id(item) not in made:
            made[id(item)] = item, rebuilt(item, {key: visit((*place, key), part) for key, part in inside.items()})
        return made[id(item)][1]

    return visit((), tree)


def spell(place: Place) -> str:
    """Return a place as Python would look it up: "", "logit", "hidden[2]"."""
    spelled = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return spelled.removeprefix(".")
