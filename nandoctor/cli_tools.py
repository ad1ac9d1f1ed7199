"""What the verbs of the command line share: options, the console, progress, and how a dump is read.

In: what click parsed. Out: a dump with its settings, a console, a bar on standard error.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from nandoctor.dumps.dump import Dump
    from nandoctor.replaying.progress import Progress

EXIT_CANNOT_TELL = 125  # what `git bisect run` takes for "skip this commit"

DumpPath = click.Path(path_type=Path)

trust_option = click.option(
    "--trust", is_flag=True, help="Unpickle whatever the file holds: only if you know who wrote it."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")


def load_dump(path: Path, options: dict[str, Any]) -> tuple[Dump, dict[str, Any]]:
    """The dump, and the options that are settings of its replay."""
    from nandoctor.case import load

    settings = dict(options)
    return load(path, trust=settings.pop("trust")), settings


def console() -> Any:
    """A console on standard output."""
    from rich.console import Console

    return Console()


@contextmanager
def _streams_apart() -> Iterator[None]:
    """A context whose code writes to standard error what it means for standard output, and has nothing to read.

    What a model prints is no part of a report, also where compiled code writes to the descriptor.
    """
    with redirect_stdout(sys.stderr), Path(os.devnull).open(encoding="utf-8") as nothing, ExitStack() as stack:
        stack.enter_context(_pointing(1, 2))
        stack.enter_context(_pointing(0, nothing.fileno()))
        stdin, sys.stdin = sys.stdin, nothing
        stack.callback(setattr, sys, "stdin", stdin)
        yield


@contextmanager
def _pointing(descriptor: int, target: int) -> Iterator[None]:
    """A context in which one descriptor is that of another file; nothing is done where one of them is closed."""
    try:
        saved = os.dup(descriptor)
    except OSError:
        yield
        return
    with suppress(OSError):
        os.dup2(target, descriptor)
    try:
        yield
    finally:
        # What compiled code has printed may still lie in the buffer of C's own stdout.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(saved, descriptor)
        os.close(saved)


@contextmanager
def progress_shown(*, quiet: bool = False) -> Iterator[Progress]:
    """A bar on standard error, gone when the work is done; nothing where standard error is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        with _streams_apart():
            yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("module calls"))
    with Progress(*columns, console=console, transient=True) as bar, _streams_apart():
        task = bar.add_task("loading", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
