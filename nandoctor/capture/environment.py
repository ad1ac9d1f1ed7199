"""Read the environment of a step: random generators, autocast, torch's backend switches, versions, ranks."""

from __future__ import annotations

import ctypes
import platform
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nandoctor import __version__
from nandoctor.autocast.kernels import is_emulating
from nandoctor.process_wide import BACKENDS, read_backend
from nandoctor.text import dtype_name

_NUM_PEEKED = 9 * 4  # bytes
_CAN_DISTRIBUTE = dist.is_available()


class RandomStates(NamedTuple):
    """The states of all generators, as their own functions return them; None for one that a replay cannot set."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    numpy: Any
    python: Any

    def to_plain(self) -> dict[str, Any]:
        """Return the states as tensors and numbers only, which any torch version can load."""
        plain: dict[str, Any] = {"torch": self.cpu}
        if self.numpy is not None:
            _, keys, position, has_gauss, cached = self.numpy
            plain["numpy"] = {
                "keys": torch.from_numpy(keys.astype("int64")),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached_gaussian": float(cached),
            }
        version, words, gauss_next = self.python
        state = torch.tensor(words, dtype=torch.int64)
        plain["python"] = {"version": version, "words": state, "gauss_next": gauss_next}
        return plain if self.cuda is None else {**plain, "cuda": self.cuda}


class Generators:
    """The process's random generators; on CUDA that of `device`, whose state is on the host, so reading never waits.

    Reading the states of numpy and Python takes longer than all other work in a step, so they are read only if words in
    memory have changed: the position, which every draw moves, and the eight words next to it, since 624 draws or a seed
    replace all words. Both generators cache the second number of a normal pair, which these words do not show: Python's
    `gauss_next` is compared as well, and numpy's state is read at every step once it has cached one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy_words, self._python_words = _Words(), _Words()
        self._numpy: Any = None
        self._python: Any = None
        self._holds_back = False
        self._can_peek = _has_words_in_memory()

    def read(self) -> RandomStates:
        """Return the current states."""
        return RandomStates(
            cpu=torch.default_generator.get_state(),
            cuda=torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
            numpy=self._read_numpy(),
            python=self._read_python(),
        )

    def _read_numpy(self) -> Any:
        """Return the state of numpy's global generator; None if it was exchanged for one that a replay cannot set."""
        numpy_random: Any = np.random
        generator = numpy_random.get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return None
        if self._numpy_words.have_changed(generator, _find_words_of_numpy) or self._holds_back:
            self._numpy = np.random.get_state()
            self._holds_back = self._holds_back or bool(self._numpy[3])
        return self._numpy

    def _read_python(self) -> Any:
        generator: Any = getattr(random.getstate, "__self__", None)
        if not self._can_peek or generator is None or type(generator) is not random.Random:
            return random.getstate()
        changed = self._python_words.have_changed(generator, _find_words_of_python)
        if changed or vars(generator)["gauss_next"] != self._python[2]:
            self._python = random.getstate()
        return self._python


class _Words:
    """Some of the words that a generator keeps in memory, as they were at the last look."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: Any = b""
        self._seen = b""

    def have_changed(self, generator: Any, find: Callable[[Any], int]) -> bool:
        """Return True if the words differ from those at the last call; `find` returns their address."""
        if generator is not self._generator:
            self._generator, self._words = generator, (ctypes.c_char * _NUM_PEEKED).from_address(find(generator))
        before, self._seen = self._seen, self._words.raw
        return before != self._seen


def _find_words_of_numpy(generator: Any) -> int:
    """Return the address of the last eight of the 624 words and of the position, which follows them."""
    return int(generator.ctypes.state_address) + 625 * 4 - _NUM_PEEKED


def _find_words_of_python(generator: random.Random) -> int:
    """Return the address behind the header of CPython's generator: the position comes first, then the words."""
    return id(generator) + object.__basicsize__


def _has_words_in_memory() -> bool:
    """Return True if a trial finds the words: other Pythons may keep them elsewhere, or ids may not be addresses."""
    if sys.implementation.name != "cpython":
        return False
    generator, words = random.Random(0), _Words()
    words.have_changed(generator, _find_words_of_python)
    generator.random()
    return words.have_changed(generator, _find_words_of_python)


def read_autocast(device_type: str) -> dict[str, Any]:
    """Return the autocast state of this thread."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    emulated = enabled and device_type != "cuda" and is_emulating(device_type)
    return _describe_autocast(device_type, enabled, dtype, torch.is_autocast_cache_enabled(), emulated)


@cache
def _describe_autocast(device: str, enabled: bool, dtype: torch.dtype, cached: bool, emulated: bool) -> dict[str, Any]:
    return {"enabled": enabled, "device": device, "dtype": dtype_name(dtype), "cache": cached, "emulated": emulated}


def read_backends() -> dict[str, Any]:
    """Return torch's switches that decide which kernel runs."""
    values = {}
    for name in BACKENDS:
        with suppress(AttributeError, RuntimeError):  # unknown to this torch, or unreadable once its newer form is set
            values[name] = read_backend(name)
    return values


def read_versions(modules: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python, torch, numpy and the like, and of those named packages that are installed."""
    versions = {"nandoctor": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    versions |= {"numpy": np.__version__, "cuda": str(torch.version.cuda), "platform": platform.platform()}
    for name in sorted({module.partition(".")[0] for module in modules} - versions.keys()):
        with suppress(PackageNotFoundError, ValueError):
            versions[name] = version(name)
    return versions


def read_rank() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) if nothing is distributed."""
    if _CAN_DISTRIBUTE and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
