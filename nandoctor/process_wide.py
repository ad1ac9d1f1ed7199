"""Make process-wide changes that several threads may hold at the same time, and set torch's switches.

`Shared` is applied by the first holder to enter and undone by the last to leave; `patched` is the only context manager
that replaces torch's functions. `SWITCHES` are for the recorder, the replay and the tests.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from nandoctor.torch_compat import FP32_PRODUCTS, default_device, look_up, print_options


class Shared:
    """A context manager around one process-wide change, re-entrant and usable from any thread."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.RLock()  # re-entrant: the garbage collector may release a holder at any line
        self._num_holders = 0
        self._change: AbstractContextManager[None] | None = None

    @property
    def held(self) -> bool:
        """True while the change has a holder."""
        return self._num_holders > 0

    def __enter__(self) -> None:
        with self._lock:
            self._num_holders += 1
            if self._change is not None:
                return
            try:
                change = self._make()
                change.__enter__()
            except BaseException:
                self._num_holders -= 1
                raise
            self._change = change

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                assert self._change is not None
                change, self._change = self._change, None
                # All holders share the change, so it is not told the exception of one.
                change.__exit__(None, None, None)


@contextmanager
def _collection_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


collection_paused = Shared(_collection_paused)
"""A context without cyclic garbage collection, for creating many small objects that live on: they would trigger
collections that traverse all of torch and of the model again and again."""


Patch = tuple[str, Callable[[Any], Any]]
"""The place of one function of torch, and the wrapper that makes its replacement."""

_process = os.getpid()


def is_forked() -> bool:
    """Return True if this process was forked from the one that imported nandoctor."""
    return os.getpid() != _process


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Replace torch's own functions with wrappers, process-wide; nothing else in nandoctor does so.

    Two contexts for the same place must be nested; `Shared` ensures that across threads.
    """
    with ExitStack() as undo:
        for place, wrap in patches:
            owner, _, name = place.rpartition(".")
            undo.enter_context(patch.object(look_up(owner), name, wrap(look_up(place))))
        yield


class PerThread(threading.local):
    """Values that each thread has for itself, to be changed by `held`; a new thread begins with those given here."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@contextmanager
def held(*settings: tuple[Any, str, Any]) -> Iterator[None]:
    """Set each attribute, an (owner, name, value), in this context; restore them in reverse order."""
    with ExitStack() as undo:
        for owner, name, value in settings:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators of Python, numpy and torch after this context; torch's of the CPU, and a CUDA `device`."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


Switch = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How one switch is read, and how it is set."""


def _attribute(owner: Any, name: str) -> Switch:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _read_autocast() -> tuple[Any, ...]:
    states = ((torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda"))
    return (*states, torch.is_autocast_cache_enabled())


def _write_autocast(setting: tuple[Any, ...]) -> None:
    *states, caches = setting
    for name, (enabled, dtype) in zip(("cpu", "cuda"), states, strict=True):
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(caches)


def _read_precisions() -> tuple[str, ...]:
    return tuple(attrgetter(place)(torch.backends).fp32_precision for place in FP32_PRODUCTS)


def _write_precisions(precisions: tuple[str, ...]) -> None:
    wanted = dict(zip(FP32_PRODUCTS, precisions, strict=True))
    if wanted != dict(zip(FP32_PRODUCTS, _read_precisions(), strict=True)):
        # Code may have set the old flag, which torch refuses to read once it differs from these.
        _CUDNN.allow_tf32 = wanted.get("cudnn.conv") == "tf32"
    for place, precision in wanted.items():
        backend = attrgetter(place)(torch.backends)
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision


_CUDA, _CUDNN = torch.backends.cuda, torch.backends.cudnn
_is_deterministic = torch.are_deterministic_algorithms_enabled
_only_warns = torch.is_deterministic_algorithms_warn_only_enabled
SWITCHES: Mapping[str, Switch] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # Torch reports "cpu" if no default was set; setting "cpu" would install a mode that intercepts every call.
    "default_device": (default_device, lambda it: torch.set_default_device(None if it.type == "cpu" else it)),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (_read_autocast, _write_autocast),
    "deterministic_algorithms": (
        _is_deterministic,
        lambda value: torch.use_deterministic_algorithms(value, warn_only=_only_warns()),
    ),
    "deterministic_warn_only": (
        _only_warns,
        lambda value: torch.use_deterministic_algorithms(_is_deterministic(), warn_only=value),
    ),
    "anomaly_detection": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda setting: torch.set_anomaly_enabled(*setting),
    ),
    # Torch has no getter; its setting affects Python too.
    "flush_denormal": (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    # Before `fp32_precision`, some of which it sets.
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "fp32_precision": (_read_precisions, _write_precisions),
    "cudnn_allow_tf32": _attribute(_CUDNN, "allow_tf32"),  # since torch 2.9 a part of `fp32_precision`
    "cudnn_enabled": _attribute(_CUDNN, "enabled"),
    "cudnn_benchmark": _attribute(_CUDNN, "benchmark"),
    "cudnn_deterministic": _attribute(_CUDNN, "deterministic"),
    "mkldnn_enabled": _attribute(torch.backends.mkldnn, "enabled"),
    "mha_fastpath": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "flash_sdp": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "mem_efficient_sdp": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "math_sdp": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "cudnn_sdp": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    "warn_always": (torch.is_warn_always_enabled, torch.set_warn_always),
    "print_options": (
        print_options,
        lambda options: torch.set_printoptions(**options),  # type: ignore[no-untyped-call]
    ),
}
RECORDED = (
    *("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp", "float32_matmul_precision", "cudnn_allow_tf32"),
    *("deterministic_algorithms", "num_threads"),
)
"""Those that decide which kernel runs, as a dump has them."""
RESTORED = tuple(name for name in SWITCHES if name != ("cudnn_allow_tf32" if FP32_PRODUCTS else "fp32_precision"))


def read_switches(names: Iterable[str] = RESTORED) -> dict[str, Any]:
    """Return the values of switches as this thread has them now; None for one that torch refuses to read.

    Torch refuses to read an old setting once a newer one is in use:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    return {name: _read(name) for name in names}


def _read(name: str) -> Any:
    with suppress(RuntimeError):
        return SWITCHES[name][0]()
    return None


def write_switches(values: Mapping[str, Any]) -> None:
    """Set the switches whose values differ from torch's current ones, but those that could not be read."""
    for name, value in values.items():
        if value is not None and _read(name) != value:
            SWITCHES[name][1](value)


def exact_switches(device_type: str) -> dict[str, Any]:
    """Return the switches with which products of fp32 tensors are computed in fp32 on a device, and no others."""
    on_cpu = device_type == "cpu"
    # Setting cuDNN's allow_tf32 changes its fp32_precision, so it comes first; unset, code that reads it would raise.
    cudnn = {} if on_cpu else {"cudnn_allow_tf32": False}
    if not FP32_PRODUCTS:
        return {**cudnn, "float32_matmul_precision": "highest"}
    places = zip(FP32_PRODUCTS, _read_precisions(), strict=True)
    precisions = tuple("ieee" if place.startswith("mkldnn") is on_cpu else now for place, now in places)
    return {**cudnn, "fp32_precision": precisions}


@contextmanager
def switched(values: Mapping[str, Any]) -> Iterator[None]:
    """Set switches in this context, except those that torch rejects beside a newer setting."""
    before = {name: value for name, value in read_switches(values).items() if value is not None}
    for name in before:
        with suppress(RuntimeError):
            write_switches({name: values[name]})
    try:
        yield
    finally:
        write_switches(before)
