"""Imports a training script for what it defines, up to the place where it begins to train.

A script without `if __name__ == "__main__":` would train again whenever a replay takes the model's class from it. One
that reads its arguments on the way gets those of the recorded training, or none, and never nandoctor's; where it ends
for want of them, what it has defined by then is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from nandoctor.dumps.dump import Dump

_importing: ContextVar[bool] = ContextVar("importing", default=False)
_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())
stopped: WeakKeyDictionary[ModuleType, BaseException] = WeakKeyDictionary()
"""The modules that were not executed to their end, and what ended them."""


class _TrainingBegins(BaseException):
    """Not to be caught by the script itself."""


@contextmanager
def importing(module: ModuleType) -> Iterator[None]:
    """Around the execution of a module: `stop_import` and an exit of its own end it, and nothing is raised."""
    token = _importing.set(True)
    try:
        with program_arguments(str(module.__file__)):
            yield
    except (_TrainingBegins, SystemExit) as why:
        stopped[module] = why
    finally:
        _importing.reset(token)


@contextmanager
def arguments_of(dump: Dump) -> Iterator[None]:
    """A context in which what is imported gets the command line of the training, if the user's own recorder wrote it.

    A script may read at its top level what it cannot go on without. Anybody else's words are not given to the user's
    code.
    """
    token = _arguments.set(dump.recorded.argv if dump.recorded is not None and dump.provenance.own else ())
    try:
        yield
    finally:
        _arguments.reset(token)


@contextmanager
def program_arguments(program: str) -> Iterator[None]:
    """A context in which `sys.argv` is not nandoctor's own; process-wide, under a project's lock."""
    before, sys.argv = sys.argv, [program, *_arguments.get()]
    try:
        yield
    finally:
        sys.argv = before


def stop_import() -> None:
    """Called where a training begins: an import for a replay has seen enough."""
    if _importing.get():
        raise _TrainingBegins
