"""The verb `triage`, for many dumps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from nandoctor.cli.shared import GroupedCommand, settings_options, show
from nandoctor.evidence.triage import Triage
from nandoctor.fleet.triage import InterruptedTriageError, TriageOptions, TriageProgress
from nandoctor.fleet.triage import triage as run_triage
from nandoctor.step.settings import OPTIONS
from nandoctor.text import plural
from nandoctor.views.triage import triage_document, triage_lines


@click.command(
    cls=GroupedCommand,
    epilog="\b\n"
    "nandoctor triage runs/ --model train.py:make_model\n"
    "nandoctor triage 'runs/*/nan-*.pth' --model train.py:make_model --jobs 8\n",
)
@click.argument("patterns", metavar="DIR|GLOB...", nargs=-1, required=True)
@click.option(
    "-o",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("nandoctor-triage"),
    show_default=True,
    help="Folder for results, reports and the page; continues an earlier run in it.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Worker processes (default: by cores and memory)."
)
@click.option("--scheduler", metavar="ADDRESS", help="Use the workers of this Dask cluster: tcp://HOST:8786.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=1800,
    show_default=True,
    metavar="SECONDS",
    help="How long one file may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines: one for each dump, one for each group.")
@settings_options("model", "step", "fixes")
@click.pass_context
def triage(context: click.Context, /, patterns: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Replay many dumps in parallel, and group them by cause and place in the code.

    Fixes are tried on one dump of each group. A file that cannot be replayed never stops the others. After Ctrl-C, run
    the same command again to go on.

    Exit: 0 all analysed, 1 none or an error, 2 wrong usage, 3 not all could be replayed.
    """
    if options["scheduler"] is not None and options["jobs"]:
        raise click.UsageError("--scheduler goes with no --jobs: the cluster has its own workers.")
    settings = {name: value for name, value in options.items() if name in OPTIONS and value is not None}
    others = {name: value for name, value in options.items() if name not in OPTIONS}
    try:
        with _progress_shown() as progress:
            found = run_triage(patterns, TriageOptions(settings=settings, **others), progress=progress)
    except InterruptedTriageError as error:
        _print(error.triage, as_json=as_json)
        raise
    _print(found, as_json=as_json)
    outcomes = {result.outcome for result in found.dumps}
    context.exit(0 if outcomes == {"analysed"} else 3 if "analysed" in outcomes else 1)


def _print(found: Triage, *, as_json: bool) -> None:
    if as_json:
        click.echo(triage_lines(found), nl=False)
    else:
        show(triage_document(found))


@contextmanager
def _progress_shown() -> Iterator[TriageProgress]:
    """Show a progress line if standard error is a terminal, and yield the function that moves it."""
    errors = Console(file=sys.stderr)
    with Progress(console=errors, transient=True, disable=not errors.file.isatty()) as bar:
        task = bar.add_task("Starting workers", total=None)
        yield lambda stage, done, total: bar.update(
            task, description=f"{stage} {done:,} of {plural(total, 'dump')}", completed=done, total=total
        )
