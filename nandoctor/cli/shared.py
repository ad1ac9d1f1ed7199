"""Options, the console and the reading of dumps, shared by the verbs of the command line."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from nandoctor.evidence.codec import to_json
from nandoctor.step.settings import OPTIONS
from nandoctor.views.blocks import document
from nandoctor.views.terminal import print_document

if TYPE_CHECKING:
    from nandoctor.views.progress import ReplayDisplay

DumpPath = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
_HEADINGS = {"model": "The model", "step": "The failing step", "fixes": "The search for fixes"}


class GroupedCommand(click.Command):
    """A command whose help has examples, then its own options, then the settings of a replay by topic."""

    def __init__(self, *args: Any, examples: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description of the verb, and commands to copy."""
        super().format_help_text(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write("".join(f"{'':{formatter.current_indent}}nandoctor {line}\n" for line in self.examples))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group of options."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(ctx)
            if record is not None:
                heading = _HEADINGS[OPTIONS[parameter.name].group] if parameter.name in OPTIONS else "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():  # "Options" has --help at least
            with formatter.section(heading):
                formatter.write_dl(records)


class OutputConsole(Console):
    """A console that raises if its pipe is closed: rich exits with 1."""

    def on_broken_pipe(self) -> None:
        """Raise what Python raises on other consoles."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def call(function: str, dump: Path, options: dict[str, Any], display: ReplayDisplay | None = None) -> Any:
    """Return what a function of `nandoctor.case` gives for a dump; a bar on standard error shows how far it is."""
    from nandoctor.machine import torch_imported
    from nandoctor.views.progress import ReplayDisplay

    with (display or ReplayDisplay()).shown() as progress:  # importing torch alone takes a second
        with torch_imported():
            from nandoctor import case

        return getattr(case, function)(case.load(dump), progress=progress, **options)


def show(thing: Any, *, as_json: bool = False, num_told: int = 0, **more: Any) -> None:
    """Print the document of anything that a verb found, but the blocks that stand there; or the record as JSON."""
    if as_json:
        click.echo(to_json(thing))
        return
    print_document(document(thing, **more)[num_told:], OutputConsole(), goes_on=num_told > 0)
