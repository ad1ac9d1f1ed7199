"""Read the environment of a step: random generators, autocast, torch's backend switches, versions, ranks."""

from __future__ import annotations

import platform
import random
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nandoctor import __version__
from nandoctor.autocast.kernels import is_emulating
from nandoctor.text import dtype_name
from nandoctor.torch_switches import RECORDED, read_switches

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


def read_generators(device: torch.device) -> RandomStates:
    """Return the states of the process's random generators; on CUDA that of the device, which is kept on the host.

    For numpy None if its generator was exchanged for one that a replay cannot set.
    """
    numpy_random: Any = np.random
    is_usual = isinstance(numpy_random.get_bit_generator(), np.random.MT19937)
    return RandomStates(
        cpu=torch.default_generator.get_state(),
        cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        numpy=np.random.get_state() if is_usual else None,
        python=random.getstate(),
    )


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
    return {name: value for name, value in read_switches(RECORDED).items() if value is not None}


def read_versions() -> dict[str, str]:
    """Return the versions of nandoctor, torch and Python, and the platform."""
    versions = {"nandoctor": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return {**versions, "cuda": str(torch.version.cuda), "platform": platform.platform()}


def read_rank() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) if nothing is distributed."""
    if _CAN_DISTRIBUTE and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
