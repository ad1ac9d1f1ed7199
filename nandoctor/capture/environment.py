"""Read the environment of a step: random generators, autocast, versions, ranks."""

from __future__ import annotations

import ctypes
import platform
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nandoctor import __version__
from nandoctor.autocast.kernels import is_emulating
from nandoctor.dumps.recorded_format import GeneratorState, NumpyState, PythonState, RandomStates
from nandoctor.text import dtype_name

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
        "emulated": enabled and device != "cuda" and is_emulating(device),
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
