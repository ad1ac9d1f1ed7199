"""Find where a class or function is defined, and hash the project's files as they were when the training began."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nandoctor.source_files import SourceHash, find_typed, hash_source, is_installed, shown_path

_MAX_SOURCES = 500


def read_attribute(thing: Any, name: str, default: Any = None) -> Any:
    """Return an attribute; the default if there is none, or if the user's object raises when it is read."""
    try:
        return getattr(thing, name, default)
    except Exception:
        return default


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside DataParallel, DistributedDataParallel and `torch.compile`, in any nesting."""
    while True:
        compiled = read_attribute(model, "_orig_mod")
        if isinstance(compiled, nn.Module):
            model = compiled
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        else:
            return model


def class_of(model: nn.Module) -> type[nn.Module]:
    """Return the class that the model was built from.

    FSDP2 and parametrizations replace it with a new class that does not exist where it claims to be defined.
    """
    return next((kind for kind in type(model).__mro__ if issubclass(kind, nn.Module) and is_found(kind)), type(model))


def is_found(thing: Any) -> bool:
    """Return True if a class or function is what its module has under its name; a class in a function counts too."""
    if "<locals>" in thing.__qualname__:
        return True  # a class inside a function cannot be looked up: take its word
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = read_attribute(found, part)
    return found is thing


def describe_source(thing: Callable[..., Any]) -> dict[str, str]:
    """Return the import path and source hash of a class or function.

    A file in the working directory is named by its relative path. Call this when training begins: the file may be
    edited later, and it cannot be found while Python exits.
    """
    name = read_attribute(thing, "__qualname__")
    name = name if isinstance(name, str) else f"<{type(thing).__qualname__} object>"
    module = str(read_attribute(thing, "__module__", ""))
    if (source := source_file(thing)) is None:
        return {"module": module, "name": name, "file": "", "sha256": ""}
    file = "" if is_installed(source) else shown_path(source)
    hashed = hash_source(source)
    return {"module": module, "name": name, "file": file, "sha256": hashed.sha256 if hashed is not None else ""}


def describe_loss(loss: Callable[..., Any]) -> dict[str, str]:
    """Return the same as `describe_source` of the function that `torch.compile` was given.

    `functools.wraps` gives a function the name of another one, which a replay must not call in its place.
    """
    inner = read_attribute(loss, "_torchdynamo_orig_callable", loss)
    described = describe_source(inner)
    module = sys.modules.get(described["module"])
    if not described["name"].isidentifier() or module is None:
        return described
    is_bound = any(vars(module).get(described["name"]) is own for own in (loss, inner))
    return described if is_bound else {**described, "name": f"<wrapped {described['name']}>"}


class ProjectSources:
    """Hashes of the project's own files that the training has imported, as they were when it began.

    `described` has the sources of the model and the loss. Files that are imported later are hashed when the next dump
    is written.
    """

    def __init__(self, *described: Mapping[str, str] | None) -> None:
        self._named = {str(Path.cwd() / source["file"]) for source in described if source and source["file"]}
        self._hashes: dict[str, SourceHash] = {}
        self._add_new()

    def _add_new(self) -> None:
        here = os.path.realpath(".").rstrip(os.sep) + os.sep
        # Read from the modules' dicts: an attribute access might import more.
        loaded = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
        files = {file for file in loaded if isinstance(file, str)} | self._named
        for path in sorted({os.path.realpath(file) for file in files}):
            name = path.removeprefix(here).replace(os.sep, "/")
            is_new = path.endswith(".py") and path.startswith(here) and name not in self._hashes
            if is_new and len(self._hashes) < _MAX_SOURCES and not is_installed(Path(path)):
                hashed = hash_source(Path(path))
                self._hashes |= {name: hashed} if hashed is not None else {}

    def describe(self) -> dict[str, dict[str, str]]:
        """Return the hashes as plain data, by the files' paths relative to the working directory."""
        self._add_new()
        return {name: asdict(found) for name, found in self._hashes.items()}


def source_file(thing: Any) -> Path | None:
    """Return the file that defines a class or function; None if it is built in, or was typed into a console."""
    try:
        path = inspect.getsourcefile(thing)
    except (TypeError, OSError):  # built in, or typed into a console
        path = read_attribute(sys.modules.get(str(read_attribute(thing, "__module__"))), "__file__")
    return Path(path).resolve() if path and Path(path).is_file() else None


def is_typed(source: Mapping[str, str]) -> bool:
    """Return True if the source is defined in this notebook or console and not in a file."""
    return not source["file"] and find_typed(source["module"], source["name"]) is not None
