"""Process-wide changes that several threads may hold at the same time.

In: a context manager that makes one such change. Out: `Shared`, made by the first that enters, undone by the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class Shared:
    """A context manager, re-entrant and usable from any thread, around one process-wide change."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._num_holders = 0
        self._change: AbstractContextManager[None] | None = None

    @property
    def held(self) -> bool:
        """Whether anybody holds the change."""
        return self._num_holders > 0

    def __enter__(self) -> None:
        with self._lock:
            if self._change is None:
                change = self._make()
                change.__enter__()
                self._change = change
            self._num_holders += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                assert self._change is not None
                change, self._change = self._change, None
                # An exception of one holder is no business of the change that all of them share.
                change.__exit__(None, None, None)
