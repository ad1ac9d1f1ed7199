"""What stands around a step: random generators, autocast, torch's switches, versions, ranks."""

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
    """The states of all generators, as their own functions give them; None where one is not there to be set."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    numpy: Any
    python: Any

    def to_plain(self) -> dict[str, Any]:
        """Tensors and numbers only, which any torch can load."""
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
    """The process's random generators; of CUDA's the one of `device`, which its host keeps: nothing waits.

    Those of numpy and Python take longer to tell their states than all else that is done in a step, so they are asked
    only once words in memory have changed: the place among all words, which each draw moves, and eight words beside it,
    since all are made anew after 624 draws or by a seed. These do not tell of the second number of a normal pair, which
    both hold back: numpy is always asked after one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy_words, self._python_words = _Words(), _Words()
        self._numpy: Any = None
        self._python: Any = None
        self._holds_back = False
        self._can_peek = _has_words_in_memory()

    def read(self) -> RandomStates:
        """The states as they are now."""
        return RandomStates(
            cpu=torch.default_generator.get_state(),
            cuda=torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
            numpy=self._read_numpy(),
            python=self._read_python(),
        )

    def _read_numpy(self) -> Any:
        """The state of numpy's global generator; None of one that somebody put there and no replay can set."""
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
    """Some of the words that a generator keeps in memory, as they were when they were last looked at."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: Any = b""
        self._seen = b""

    def have_changed(self, generator: Any, find: Callable[[Any], int]) -> bool:
        """True if they differ from those at the last call; `find` gives their address."""
        if generator is not self._generator:
            self._generator, self._words = generator, (ctypes.c_char * _NUM_PEEKED).from_address(find(generator))
        before, self._seen = self._seen, self._words.raw
        return before != self._seen


def _find_words_of_numpy(generator: Any) -> int:
    """The last of its 624 words, and the place among them behind these."""
    return int(generator.ctypes.state_address) + 625 * 4 - _NUM_PEEKED


def _find_words_of_python(generator: random.Random) -> int:
    """What CPython's generator has in memory behind its header: the place first; `gauss_next` is an attribute."""
    return id(generator) + object.__basicsize__


def _has_words_in_memory() -> bool:
    """Try it: another Python may keep the words elsewhere, where an id is an address at all."""
    if sys.implementation.name != "cpython":
        return False
    generator, words = random.Random(0), _Words()
    words.have_changed(generator, _find_words_of_python)
    generator.random()
    return words.have_changed(generator, _find_words_of_python)


def read_autocast(device_type: str) -> dict[str, Any]:
    """The autocast that this thread is under."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    emulated = enabled and device_type != "cuda" and is_emulating(device_type)
    return _describe_autocast(device_type, enabled, dtype, torch.is_autocast_cache_enabled(), emulated)


@cache
def _describe_autocast(device: str, enabled: bool, dtype: torch.dtype, cached: bool, emulated: bool) -> dict[str, Any]:
    return {"enabled": enabled, "device": device, "dtype": dtype_name(dtype), "cache": cached, "emulated": emulated}


def read_arguments() -> list[str]:
    """The command line of the training, without the program."""
    return [str(argument) for argument in sys.argv[1:]]


def read_backends() -> dict[str, Any]:
    """Torch's switches that decide which kernel runs."""
    values = {}
    for name in BACKENDS:
        with suppress(AttributeError, RuntimeError):  # another torch's, or one that may not be read beside a newer
            values[name] = read_backend(name)
    return values


def read_versions(modules: Sequence[str]) -> dict[str, str]:
    """The versions of what ran; of the packages named, those that are installed."""
    versions = {"nandoctor": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    versions |= {"numpy": np.__version__, "cuda": str(torch.version.cuda), "platform": platform.platform()}
    for name in sorted({module.partition(".")[0] for module in modules} - versions.keys()):
        try:
            versions[name] = version(name)
        except (PackageNotFoundError, ValueError):
            continue
    return versions


def read_rank() -> tuple[int, int]:
    """(rank, world size), (0, 1) where nothing is distributed."""
    if _CAN_DISTRIBUTE and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
