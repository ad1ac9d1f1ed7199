"""Options, the console and the reading of dumps, shared by the verbs of the command line.

The options of a replay are made from `Settings`, so that they cannot differ from it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console

from nandoctor.dumps.recorded_format import read_option
from nandoctor.errors import NanDoctorError
from nandoctor.step.settings import OPTIONS, Option, OptionGroup, check_setting
from nandoctor.views.blocks import Block
from nandoctor.views.save import check_target
from nandoctor.views.terminal import print_document

if TYPE_CHECKING:
    from nandoctor.views.progress import ReplayDisplay

_Verb = Callable[..., None]
DumpPath = click.Path(path_type=Path, readable=False)  # the reader says what to do about one that cannot be read
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
MODEL_AND_STEP: tuple[OptionGroup, ...] = ("model", "step")
_HEADINGS = {"model": "The model", "step": "The failing step", "fixes": "The search for fixes"}


class GroupedCommand(click.Command):
    """A command whose help has its own options, then the settings of a replay by topic."""

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


def show(document: Iterable[Block]) -> None:
    """Print the document of anything that a verb found."""
    print_document(document, OutputConsole())


def settings_options(*groups: OptionGroup, without: str = "") -> Callable[[_Verb], _Verb]:
    """Add the options of these groups to a verb; it gets each by its name in `Settings`, None if it was not given."""

    def decorate(verb: _Verb) -> _Verb:
        for name, option in reversed(tuple(OPTIONS.items())):
            if option.group in groups and name != without:
                verb = _make_option(name, option)(verb)
        return verb

    return decorate


def _make_option(name: str, option: Option) -> Callable[[_Verb], _Verb]:
    shape: dict[str, Any] = {"metavar": option.metavar or None}
    if option.holds == "true or false":
        shape = {"is_flag": True}
    elif option.choices:
        shape = {"type": click.Choice(option.choices)}
    elif name == "model_args":
        shape["multiple"] = True
    elif option.reads is not str:
        shape["type"] = option.reads  # its ValueError is reported as wrong usage
    elif option.metavar in ("SPEC", "PATH"):
        shape["shell_complete"] = lambda *_: [CompletionItem("", type="file")]
    return click.option(option.flag, name, help=option.help, callback=partial(_check, name), **shape)


def _check(name: str, _: click.Context, __: click.Parameter, value: Any) -> Any:
    """Turn the text after a flag into a setting; an invalid value is wrong usage."""
    if value is None or value is False or value == ():
        return None
    if value is True:
        value = not OPTIONS[name].flag.startswith("--no-")
    if name == "model_args":
        value = dict(map(_parse_argument, value))
    with wrong_usage():
        check_setting(name, value)
    return value


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Report an error about what was typed as wrong usage."""
    try:
        yield
    except NanDoctorError as error:
        raise click.BadParameter(f"{error.message} {error.remedy}") from error


def _parse_argument(text: str) -> tuple[str, Any]:
    """Parse K=V, where V is a Python literal if it reads as one, else a string."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not K=V.")
    return name, read_option(value)


def file_option(name: str, endings: Sequence[str], about: str, *, multiple: bool = False) -> Callable[[_Verb], _Verb]:
    """Return the option -o, which checks before the replay that its files can be written after it, and may be."""

    def check(_: click.Context, __: click.Parameter, files: Path | tuple[Path, ...] | None) -> Any:
        with wrong_usage():
            for file in files if isinstance(files, tuple) else filter(None, [files]):
                check_target(file, endings)
        return files

    path = click.Path(path_type=Path)
    return click.option("-o", name, metavar="FILE", type=path, multiple=multiple, callback=check, help=about)
