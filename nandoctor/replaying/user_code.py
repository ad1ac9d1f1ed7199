"""Keeps the process alive where the user's code would end it.

In: nothing. Out: `kept_running`, a context around code of the user's, in which an exit is an error like any other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import NoReturn

from nandoctor.process_wide import Shared


class ProcessEndError(RuntimeError):
    """The user's code called `sys.exit` or `os._exit`."""


class _Inside(threading.local):
    """The process in which this thread runs code of the user's, None where it does not: a fork of it may exit."""

    process: int | None = None


_inside = _Inside()


@contextmanager
def kept_running() -> Iterator[None]:
    """A context in which this thread's `sys.exit` and `os._exit` raise.

    Raises ProcessEndError where the code inside called one of them; its traceback is that of the call.
    """
    outer, _inside.process = _inside.process, os.getpid()
    try:
        with _exits_raise:
            yield
    except SystemExit as error:
        ended = ProcessEndError(f"the code ended the process (exit status {error.code})")
        raise ended.with_traceback(error.__traceback__) from error
    finally:
        _inside.process = outer


@contextmanager
def _patched_exit() -> Iterator[None]:
    leave = os._exit

    @wraps(leave)
    def raise_exit(status: int) -> NoReturn:
        if _inside.process == os.getpid():
            raise SystemExit(status)
        leave(status)

    os._exit = raise_exit
    try:
        yield
    finally:
        os._exit = leave


_exits_raise = Shared(_patched_exit)
