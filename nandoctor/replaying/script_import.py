"""Imports a training script for what it defines, up to the place where it begins to train.

In: a module that is about to be executed. Out: its names above the first `Recorder` that it makes at its top level.

A script without `if __name__ == "__main__":` would train again whenever a replay takes the model's class from it. One
that reads its arguments on the way is not to read nandoctor's; where it ends for want of them, what it has defined by
then is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from weakref import WeakKeyDictionary

_importing: ContextVar[bool] = ContextVar("importing", default=False)
stopped: WeakKeyDictionary[ModuleType, BaseException] = WeakKeyDictionary()
"""The modules that were not executed to their end, and what ended them."""


class _TrainingBegins(BaseException):
    """Not to be caught by the script itself."""


@contextmanager
def importing(module: ModuleType) -> Iterator[None]:
    """Around the execution of a module: `stop_import` and an exit of its own end it, and nothing is raised."""
    token = _importing.set(True)
    try:
        with bare_arguments(str(module.__file__)):
            yield
    except (_TrainingBegins, SystemExit) as why:
        stopped[module] = why
    finally:
        _importing.reset(token)


@contextmanager
def bare_arguments(program: str) -> Iterator[None]:
    """A context in which `sys.argv` is that of a program without arguments; process-wide, under a project's lock."""
    before, sys.argv = sys.argv, [program]
    try:
        yield
    finally:
        sys.argv = before


def stop_import() -> None:
    """Called where a training begins: an import for a replay has seen enough."""
    if _importing.get():
        raise _TrainingBegins
