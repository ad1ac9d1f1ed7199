"""The state dict of a module that was saved as a whole, from the record of its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from nandoctor.errors import DumpError

_PARTS = ("_parameters", "_buffers", "_modules")
_MAX_DEPTH = 64
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
    for name, value in _walk(module, "", 0):
        state[name] = value
        if len(state) > _MAX_TENSORS:
            raise _too_large()
    return state


def _walk(module: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    if depth > _MAX_DEPTH:
        raise _too_large()
    dropped = module.get("_non_persistent_buffers_set")
    kept_out = dropped if isinstance(dropped, set | frozenset) else frozenset()
    for part in ("_parameters", "_buffers"):
        for name, value in module[part].items():
            if value is not None and name not in kept_out:
                yield f"{prefix}{name}", value
    for name, child in module["_modules"].items():
        if is_module(child):
            yield from _walk(child, f"{prefix}{name}.", depth + 1)


def _too_large() -> DumpError:
    return DumpError(
        "its model is nested too deeply, or has more tensors than any model does.",
        remedy="Save model.state_dict() beside the batch.",
    )
