"""Options, the console and the reading of dumps, shared by the verbs of the command line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich.console import Console

if TYPE_CHECKING:
    from nandoctor.dumps.dump import Dump
    from nandoctor.evidence.report import Report

DumpPath = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")


def console(file: TextIO | None = None) -> Console:
    """Return a console on `file`, by default standard output, that raises if its pipe is closed: rich exits with 1."""
    return _Raising(file=file)


class _Raising(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextmanager
def opened_dump(path: Path, options: dict[str, Any]) -> Iterator[tuple[Dump, dict[str, Any]]]:
    """Yield the dump and the keywords of its replay: its settings, and a bar on standard error, if it is a terminal."""
    from nandoctor.cli.display import ReplayDisplay

    with ReplayDisplay(console(sys.stdout), tells=False).shown() as display:
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
    from nandoctor.cli.display import NUM_TOLD
    from nandoctor.views.document import document
    from nandoctor.views.terminal import print_document

    print_document(document(report, has_page=has_page)[NUM_TOLD if told else 0 :], console(), goes_on=told)
