"""The command line `nandoctor`; a verb's module is imported when the verb is used."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import Any

import click

from nandoctor import __version__
from nandoctor.cli.failures import EXIT_CANNOT_TELL, TYPED, failures_told
from nandoctor.errors import NanDoctorError

__all__ = ["VERBS", "find_verb", "main"]

VERBS = {
    "explain": ("commands", "Explain what a cause is, why it happens and how it is fixed."),
    "fix": ("verify", "Print the smallest verified change as a diff, or write it."),
    "inspect": ("commands", "Show what is in DUMP, without running any code of it."),
    "plot": ("commands", "Replay DUMP, and plot its layers."),
    "replay": ("commands", "Replay DUMP, name the first non-finite layer, and find a fix."),
    "repro": ("commands", "Write a script with the smallest tensors that still fail."),
    "triage": ("triage", "Replay many dumps in parallel, and group them by cause and place."),
    "verify": ("verify", "Check whether the failing step of DUMP passes now."),
}
"""Every verb: its module in this package, and its description in the list of all."""


def find_verb(name: str) -> click.Command:
    """Import and return the command of that name."""
    verb: click.Command = getattr(importlib.import_module(f"nandoctor.cli.{VERBS[name][0]}"), name)
    return verb


class _Verbs(click.Group):
    """The group of all verbs; it reports failures in one place, including those of --help and --version."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **kwargs: Any) -> click.Context:
        typed = [*args]  # parsing empties the list
        with failures_told():
            context = super().make_context(info_name, args, *rest, **kwargs)
        context.meta[TYPED] = typed
        return context

    def invoke(self, context: click.Context) -> Any:
        from nandoctor.hidden_warnings import warnings_hidden

        with failures_told(), warnings_hidden():
            return super().invoke(context)

    def list_commands(self, _: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        return find_verb(name) if name in VERBS else None

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_module, about) in VERBS.items()])


def _show_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the versions that a bug report needs, without importing torch."""
    if asked and not context.resilient_parsing:
        import platform
        from importlib.metadata import version

        click.echo(f"nandoctor {__version__} (torch {version('torch')}, Python {platform.python_version()})")
        context.exit()


def _require_working_directory() -> None:
    """Raise NanDoctorError if the working directory was deleted, where even loading torch's libraries fails."""
    try:
        os.getcwd()  # noqa: PTH109 - pathlib alone takes as long to import as all that `--help` needs but click
    except FileNotFoundError as error:
        gone = NanDoctorError("The working directory no longer exists.", remedy="Change to one that does.")
        gone.exit_code = EXIT_CANNOT_TELL  # of verify and --check, 1 would say that the step still fails
        raise gone from error


def _keep_streams_apart() -> None:
    """Leave standard output to nandoctor: what else this process prints, also compiled code, goes to standard error.

    A model finds nothing on standard input.
    """
    if sys.__stdout__ is None or sys.stdout is not sys.__stdout__:  # a notebook's, or a test's
        return
    with suppress(OSError), open(os.devnull, "rb") as nothing:  # noqa: PTH123 - one that is closed stays so
        output = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        os.dup2(2, 1)
        sys.stdout = output
        os.dup2(nothing.fileno(), 0)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the versions and exit.",
)
def main() -> None:
    """The post-mortem for mixed-precision training that died with NaN.

    \b
    nandoctor replay dump.pth --model train.py:make_model
    nandoctor fix dump.pth --model train.py:make_model --write
    nandoctor verify dump.pth --model train.py:make_model
    nandoctor triage runs/ --model train.py:make_model
    """  # noqa: D301  (click wants the escape itself)
    _require_working_directory()
    _keep_streams_apart()
    if "torch" not in sys.modules:
        from nandoctor.machine import share_cores

        # Scripted code then runs as the Python that it was written in, so its expressions can be named and changed.
        os.environ.setdefault("PYTORCH_JIT", "0")
        share_cores()
