"""Imports a training script for what it defines, up to the place where it begins to train.

In: a module that is about to be executed. Out: its names above the first `Recorder` that it makes at its top level.

A script without `if __name__ == "__main__":` would train again whenever a replay takes the model's class from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from weakref import WeakSet

_importing: ContextVar[bool] = ContextVar("importing", default=False)
stopped: WeakSet[ModuleType] = WeakSet()
"""The modules that were not executed to their end."""


class _TrainingBegins(BaseException):
    """Not to be caught by the script itself."""


@contextmanager
def importing(module: ModuleType) -> Iterator[None]:
    """Around the execution of a module: `stop_import` ends it, and nothing is raised."""
    token = _importing.set(True)
    try:
        yield
    except _TrainingBegins:
        stopped.add(module)
    finally:
        _importing.reset(token)


def stop_import() -> None:
    """Called where a training begins: an import for a replay has seen enough."""
    if _importing.get():
        raise _TrainingBegins
