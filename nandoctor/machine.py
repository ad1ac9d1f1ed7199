"""The cores and memory that this process may use, within the limits of its container.

None if the system does not say.
"""

from __future__ import annotations

import errno
import gc
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")
_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED_FROM = 1 << 20
# Messages of errors that have no class of their own, from loaders, memory maps and allocators: dlopen and mmap by
# strerror, c10/core/impl/alloc_cpu.cpp on Linux and on Windows, C++'s own new, CUDA.
_NO_MEMORY = (
    *("cannot allocate memory", "can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc"),
    "failed to map segment",
)


def count_cores() -> int:
    """Return the number of cores that this process may use, within the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max" where there is no quota
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return min(cores, math.ceil(int(quota) / int(period)))
    return cores


def share_cores() -> None:
    """Make the torch that is imported next share cores with other programs; what the user has set stays.

    By default OpenMP's threads spin while they wait: beside other programs a replay of a small model took four times as
    long. And torch counts the machine's cores, not those that a container may use.
    https://www.openmp.org/spec-html/5.0/openmpse55.html
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if count_cores() < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(count_cores()))


@contextmanager
def torch_imported() -> Iterator[None]:
    """Import torch in this context without garbage collections, and leave what it made out of later ones.

    Each walks all that has been made so far: a fifth of the import goes into them. A process that had torch before may
    not be nandoctor's own, and is left alone.
    """
    is_first = "torch" not in sys.modules
    if is_first:
        gc.disable()
    yield
    if is_first:
        gc.freeze()
        gc.enable()


def available_memory() -> int | None:
    """Return the bytes that can be allocated before the machine, or the container, runs out."""
    limits = [_read_field(Path("/proc/meminfo"), "MemAvailable:")]
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int((_CGROUP / "memory.max").read_text())
        used = _read_field(_CGROUP / "memory.stat", "anon", unit=1) or 0  # cached files can be dropped
        limits.append(max(limit - used, 0))
    return min((limit for limit in limits if limit is not None), default=None)


def memory_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the elements of these tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if memory ran out, on the CPU or a GPU, in this exception or one that caused it.

    An exception that is raised again may be among its own causes.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, (RuntimeError, ImportError)) and any(text in str(error).lower() for text in _NO_MEMORY):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def limit_memory(nbytes: int) -> None:
    """Make allocations fail beyond `nbytes` of private writable memory, where the system has such a limit.

    A lower limit stays. Files that are mapped for reading do not count.
    https://man7.org/linux/man-pages/man2/getrlimit.2.html, RLIMIT_DATA.
    """
    if sys.platform != "linux":
        return
    import resource  # noqa: PLC0415  (not on Windows)

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = (limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (min([nbytes, *limits]), hard))


def return_freed_memory() -> None:
    """Make glibc return blocks of a megabyte and more to the system when they are freed.

    By default it raises that size to 32 MB, and keeps smaller blocks: 0.9 GB of a model with layers of 16 MB.
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415

        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)


def _read_field(path: Path, name: str, unit: int = 1024) -> int | None:
    """Return the number in a line of /proc, which counts in KiB, as bytes; None if there is no such line."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1]) * unit
    return None
