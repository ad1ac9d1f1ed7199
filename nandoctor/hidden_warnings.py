"""Keeps the warnings of a training's code off the screen of a command."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_hidden() -> Iterator[None]:
    """Hide what the replayed code warns of, as it did in the training; not if `-W` asks for it, or makes it an error.

    Python names the line that calls torch as the place, which is one of nandoctor's in a replay.
    """
    if sys.warnoptions or any(action == "error" for action, *_ in warnings.filters):
        yield
        return
    with warnings.catch_warnings(action="ignore"):
        yield
