"""The state dict of a module that was saved as a whole, from the record of its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from nandoctor.dumps.trees import too_large
from nandoctor.trees import BEYOND, walk

_PARTS = ("_parameters", "_buffers", "_modules")
_MAX_TENSORS = 100_000


def is_module(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return True for the attributes of an `nn.Module`, as they are pickled."""
    return isinstance(value, Mapping) and all(isinstance(value.get(part), Mapping) for part in _PARTS)


def state_of(module: Mapping[str, Any]) -> dict[str, object]:
    """Return what the module's `state_dict()` would, without running its code: an overridden one is not known.

    Raises:
        DumpError: it is nested too deeply, or has more tensors than any model.
    """
    state: dict[str, object] = {}
    for place, item in walk(module, _children):
        if item is BEYOND or len(state) > _MAX_TENSORS:
            raise too_large()
        state |= {".".join([*place, name]): value for name, value in _own_state(item)}
    return state


def _children(module: Mapping[str, Any]) -> Mapping[str, Any]:
    return {str(name): child for name, child in module["_modules"].items() if is_module(child)}


def _own_state(module: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    dropped = module.get("_non_persistent_buffers_set")
    kept_out = dropped if isinstance(dropped, set | frozenset) else frozenset()
    for part in ("_parameters", "_buffers"):
        for name, value in module[part].items():
            if value is not None and name not in kept_out:
                yield str(name), value
