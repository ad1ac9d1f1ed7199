"""Make process-wide changes that several threads may hold at the same time.

`Shared` is applied by the first holder to enter and undone by the last to leave; `patched` is the only context manager
that replaces torch's functions.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from nandoctor.torch_compat import look_up


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
            original = look_up(place)
            owner, name = look_up(place.rpartition(".")[0]), place.rpartition(".")[2]
            own = vars(owner).get(name)
            if own is None:  # inherited
                undo.callback(delattr, owner, name)
            else:
                undo.callback(setattr, owner, name, own)
            setattr(owner, name, wrap(original))
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
