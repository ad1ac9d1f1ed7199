"""Options, the console, progress and the reading of dumps, shared by the verbs of the command line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich.console import Console

from nandoctor.views.progress import ReplayBar

if TYPE_CHECKING:
    from nandoctor.dumps.dump import Dump
    from nandoctor.evidence.report import Report

DumpPath = click.Path(path_type=Path)
NUM_TOLD = 2
"""So many blocks of a report are known before any search for fixes: the headline and the answer."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")


def console(file: TextIO | None = None) -> Console:
    """Return a console on `file`, by default standard output, that raises if its pipe is closed: rich exits with 1."""
    return _Raising(file=file)


class _Raising(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class ReplayDisplay(ReplayBar):
    """The display of a running replay: bars on standard error, the diagnosis on standard output once it is known.

    `told` is True once the diagnosis was printed; an interrupt of the search then gives the rest of the report. There
    is no bar if standard error is not a terminal.
    """

    def __init__(self, *, tells: bool) -> None:
        errors = Console(stderr=True)
        super().__init__(errors, shown=errors.is_terminal and not errors.is_dumb_terminal)
        self.told = False
        self.stops_gently = tells
        self._tells = tells
        self._output = console(sys.stdout)  # before what a model prints is redirected

    def tell(self, report: Report) -> None:
        """Print the answer, before any fix was tried, and go on to the bar of the search."""
        if self._tells:
            from nandoctor.views.document import document
            from nandoctor.views.terminal import print_document

            self.display.stop()
            print_document(document(report)[:NUM_TOLD], self._output)
            self._output.file.flush()
            self.told = True
            self.display.start()
        self.searched(0, None, "")

    @contextmanager
    def shown(self) -> Iterator[ReplayDisplay]:
        """Show the bar while the replay runs; what a model prints goes to standard error."""
        with redirect_stdout(sys.stderr), self.display:
            yield self


@contextmanager
def opened_dump(path: Path, options: dict[str, Any]) -> Iterator[tuple[Dump, dict[str, Any]]]:
    """Yield the dump and the keywords of its replay: its settings, and a bar on standard error, if it is a terminal."""
    with ReplayDisplay(tells=False).shown() as display:
        from nandoctor.case import load

        yield load(path), {**options, "progress": display}


def show(thing: Any, *, as_json: bool = False, **more: Any) -> None:
    """Print the document of anything that a verb found, or the record itself as JSON."""
    if as_json:
        from nandoctor.views.jsonfile import dumps

        click.echo(dumps(thing))
        return
    from nandoctor.views.document import document
    from nandoctor.views.terminal import print_document

    print_document(document(thing, **more), console())


def print_report(report: Report, *, told: bool, has_page: bool) -> None:
    """Print the report; only the rest of it if its first part was `told` already."""
    from nandoctor.views.document import document
    from nandoctor.views.terminal import print_document

    print_document(document(report, has_page=has_page)[NUM_TOLD if told else 0 :], console(), goes_on=told)
