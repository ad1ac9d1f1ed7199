"""Find where a model keeps its tensors: each module has one registry of parameters and one of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

Place = tuple[str, dict[str, Any], str]
"""A tensor's path in the model, its module's registry, and its name there."""

_SCRIPTED: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def as_dict(held: Any) -> dict[str, Any]:
    """Return the registry; for TorchScript, whose registries are not Python dicts, a dict that is refreshed here."""
    if isinstance(held, dict):
        return held
    plain = _SCRIPTED.setdefault(held, {})
    plain.clear()
    plain.update(held.items())
    return plain


def places_of(model: nn.Module, registry_of: Callable[[nn.Module], Any]) -> list[Place]:
    """Return the places of all parameters, or of all buffers; `registry_of` gets the registry of a module."""
    return [
        (f"{path}.{name}" if path else name, registry, name)
        for path, module in model.named_modules()
        for registry in [as_dict(registry_of(module))]
        for name in registry
    ]
