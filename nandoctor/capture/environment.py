"""Read what a step ran in: random generators, autocast, versions, ranks, and the source files of its code."""

from __future__ import annotations

import ctypes
import inspect
import os
import platform
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nandoctor import __version__
from nandoctor.autocast.kernels import shared_kernels
from nandoctor.dumps.recorded_format import GeneratorState, NumpyState, PythonState, RandomStates
from nandoctor.source_files import SourceHash, find_typed, hash_source, is_installed
from nandoctor.text import dtype_name, relative_path

_CAN_DISTRIBUTE = dist.is_available()
_MT19937_NBYTES = 625 * 4
"""624 words and the position among them: https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html"""


class Generators:
    """A reader of the process's random generators.

    Numpy takes longer to return its state than all the others together, so it is asked again only if the memory of its
    generator has changed, or if it holds the second of two normal numbers, which is not in that memory.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._numpy: NumpyState | None = None

    def read(self, device: torch.device) -> RandomStates:
        """Return the states; on CUDA that of the device, which is kept on the host.

        For numpy None if its generator was exchanged for one that a replay cannot set.
        """
        numpy_random: Any = np.random
        generator = numpy_random.get_bit_generator()
        is_usual = isinstance(generator, np.random.MT19937)
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_NBYTES) if is_usual else b""
        if is_usual and (memory != self._memory or self._numpy is None or self._numpy[3]):
            self._memory, self._numpy = memory, numpy_random.get_state()
        return RandomStates(
            torch=GeneratorState(torch.default_generator.get_state()),
            cuda=GeneratorState(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
            numpy=self._numpy if is_usual else None,
            python=PythonState(random.getstate()),
        )


def describe_generators(states: RandomStates) -> dict[str, Any]:
    """Return the states as tensors and numbers only, which any torch version can load."""
    assert states.python is not None
    version, words, gauss_next = states.python
    words = torch.tensor(words, dtype=torch.int64)
    plain = {"torch": states.torch, "python": {"version": version, "words": words, "gauss_next": gauss_next}}
    if states.numpy is not None:
        _, keys, position, has_gauss, cached = states.numpy
        keys = torch.from_numpy(keys.astype("int64"))
        numbers = {"position": int(position), "has_gauss": int(has_gauss), "cached_gaussian": float(cached)}
        plain["numpy"] = {"keys": keys, **numbers}
    return plain if states.cuda is None else {**plain, "cuda": states.cuda}


def read_autocast(device: str) -> dict[str, Any]:
    """Return the autocast state of this thread."""
    enabled = torch.is_autocast_enabled(device)
    return {
        "enabled": enabled,
        "device": device,
        "dtype": dtype_name(torch.get_autocast_dtype(device)),
        "cache": torch.is_autocast_cache_enabled(),
        "emulated": enabled and device != "cuda" and shared_kernels(device).held,
    }


def read_versions() -> dict[str, str]:
    """Return the versions of nandoctor, torch and Python, and the platform."""
    versions = {"nandoctor": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return {**versions, "cuda": str(torch.version.cuda), "platform": platform.platform()}


def read_rank() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) if nothing is distributed."""
    if _CAN_DISTRIBUTE and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


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


def called_model(model: nn.Module) -> nn.Module:
    """Return the module whose calls are those of the loop: that inside a wrapper which gives its state as its own.

    Fabric's wrapper does so; it converts the inputs, and opens autocast around the call of the module.
    """
    if type(model).state_dict is not nn.Module.state_dict:
        with suppress(Exception):  # of a model that is not ready
            names = model.state_dict().keys()
            return next((child for child in model.children() if names and child.state_dict().keys() == names), model)
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
    file = "" if is_installed(source) else relative_path(source)
    hashed = hash_source(source)
    return {"module": module, "name": name, "file": file, "sha256": hashed.sha256 if hashed is not None else ""}


def describe_loss(loss: Callable[..., Any]) -> dict[str, str]:
    """Return the same as `describe_source` of the function that `torch.compile` was given.

    `functools.wraps` gives a function the name of another one, which a replay must not call in its place.
    """
    inner = read_attribute(loss, "_torchdynamo_orig_callable", loss)
    described = describe_source(inner)
    if not described["name"].isidentifier() or is_found(inner) or is_found(loss):
        return described
    return {**described, "name": f"<wrapped {described['name']}>"}


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
