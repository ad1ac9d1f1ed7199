"""What the verbs of the command line share: options, the console, progress, and how a dump is read."""

from __future__ import annotations

import ast
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from click.shell_completion import CompletionItem

from nandoctor.errors import NanDoctorError
from nandoctor.renderers.save import check_ending, is_replaceable
from nandoctor.replaying.progress import Listener
from nandoctor.replaying.settings import OPTIONS, Option, OptionGroup, check_setting
from nandoctor.text import parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from nandoctor.dumps.dump import Dump
    from nandoctor.evidence.report import Report


Verb = Callable[..., None]

_FORCE = "nandoctor.force"
MODEL_AND_STEP: tuple[OptionGroup, ...] = ("model", "step", "machine")

_HEADINGS: dict[OptionGroup, str] = {
    "model": "The model",
    "step": "The failing step",
    "machine": "The machine",
    "statistics": "Statistics",
    "fixes": "The search for fixes",
}


class GroupedCommand(click.Command):
    """A command whose help has examples, then its own options, then the settings of a replay by what they are about."""

    def __init__(self, *args: Any, examples: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the verb does, and commands to copy."""
        super().format_help_text(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write("".join(f"{'':{formatter.current_indent}}nandoctor {line}\n" for line in self.examples))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(ctx)
            if record is not None:
                heading = _HEADINGS[OPTIONS[parameter.name].group] if parameter.name in OPTIONS else "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def settings_options(*groups: OptionGroup, without: str = "") -> Callable[[Verb], Verb]:
    """Add the options of these groups to a verb; it gets each by its name in `Settings`, None where it is not given."""

    def decorate(verb: Verb) -> Verb:
        for name, option in reversed(tuple(OPTIONS.items())):
            if option.group in groups and name != without:
                verb = _make_option(name, option)(verb)
        return verb

    return decorate


def _make_option(name: str, option: Option) -> Callable[[Verb], Verb]:
    shape: dict[str, Any] = {"metavar": option.metavar or None}
    if option.holds == "true or false":
        shape = {"is_flag": True}
    elif option.choices:
        shape = {"type": click.Choice(option.choices)}
    elif name == "model_args":
        shape["multiple"] = True
    elif option.reads is not str:
        shape["type"] = option.reads  # a ValueError of its own is wrong usage
    elif option.metavar in ("SPEC", "PATH"):
        shape["shell_complete"] = lambda *_: [CompletionItem("", type="file")]
    return click.option(option.flag, name, help=option.help, callback=_check(name), **shape)


def _check(name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """What turns the text after a flag into a setting; a value that cannot be is wrong usage."""

    def check(_: click.Context, __: click.Parameter, value: Any) -> Any:
        if value is None or value is False or value == ():
            return None
        if value is True:
            value = not OPTIONS[name].flag.startswith("--no-")
        if name == "model_args":
            value = dict(map(_parse_argument, value))
        try:
            check_setting(name, value)
        except NanDoctorError as error:
            raise click.BadParameter(f"{error.message} {error.remedy}") from error
        return value

    return check


def _parse_argument(text: str) -> tuple[str, Any]:
    """K=V, where V is a Python literal if it reads as one, and a string if not."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not K=V.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return name, value


def read_size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Bytes: 8GB, 512 MiB, 1e9."""
    try:
        return None if text is None else parse_size(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no size: write 8GB or 512MiB.") from None


def _keep_force(context: click.Context, _: click.Parameter, force: bool) -> None:
    context.meta[_FORCE] = force


force_option = click.option(
    "--force", is_flag=True, is_eager=True, expose_value=False, callback=_keep_force, help="Write over any other file."
)


def check_replaceable(file: Path) -> None:
    """Refuse to write over what the verb reads, and over what nandoctor did not write unless --force is given."""
    context = click.get_current_context()
    for value in context.params.values():
        for path in value if isinstance(value, tuple) else (value,):
            # A SPEC names its file before the last colon.
            read = Path(path.rpartition(":")[0]) if isinstance(path, str) and ".py:" in path else path
            if isinstance(read, Path) and read.exists() and file.exists() and read.samefile(file):
                raise click.BadParameter(f"{file} is the file that is read.")
    if not context.meta.get(_FORCE) and not is_replaceable(file):
        raise click.BadParameter(f"{file} exists, and nandoctor did not write it: name another file, or add --force.")


def file_option(name: str, endings: Sequence[str], about: str, *, multiple: bool = False) -> Callable[[Verb], Verb]:
    """The option -o, which refuses before the replay what could not be written after it, or should not be."""

    def check(_: click.Context, __: click.Parameter, files: Path | tuple[Path, ...] | None) -> Any:
        for file in files if isinstance(files, tuple) else filter(None, [files]):
            try:
                check_ending(file, endings)
            except NanDoctorError as error:
                raise click.BadParameter(error.message) from error
            check_replaceable(file)
            if not file.parent.is_dir():
                raise click.BadParameter(f"there is no folder {file.parent}.")
        return files

    path = click.Path(path_type=Path)
    return click.option("-o", name, metavar="FILE", type=path, multiple=multiple, callback=check, help=about)


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


def console(file: TextIO | None = None) -> Console:
    """A console on `file`, by default standard output, that raises where nobody reads: rich would exit with 1."""
    from rich.console import Console

    class Raising(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Raising(file=file)


def _own_output() -> TextIO:
    """Standard output as it is now, on a descriptor of its own: what a model prints is about to be sent elsewhere."""
    output = sys.stdout
    try:
        descriptor = os.dup(output.fileno())
    except (OSError, AttributeError):
        return output  # a notebook's, or a test's
    return os.fdopen(descriptor, "w", encoding=output.encoding, errors=output.errors)


class ReplayDisplay(Listener):
    """Shows a replay as it gets on: bars on standard error, the diagnosis on standard output once it is known.

    `told` says that it was printed; an interrupt of the search then gives the rest of the report. With `quiet` nothing
    is shown; where standard error is no terminal there is no bar.
    """

    def __init__(self, *, quiet: bool, tells: bool) -> None:
        from rich.console import Console

        from nandoctor.renderers.progress import ReplayBar

        self.told = False
        self.stops_gently = tells
        self._tells = tells
        self._output = console(_own_output())
        errors = Console(stderr=True)
        self._bar = ReplayBar(errors, shown=errors.is_terminal and not errors.is_dumb_terminal and not quiet)

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Move the bar of the diagnosis."""
        self._bar.run(stage, done, total)

    def tell(self, report: Report) -> None:
        """Print the answer, before any fix was tried, and go on to the bar of the search."""
        from nandoctor.renderers.console import print_parts
        from nandoctor.renderers.terminal import answer_parts

        if self._tells:
            self._bar.display.stop()
            print_parts(answer_parts(report, self._output.width), self._output, crop=False)
            self._output.file.flush()
            self.told = True
            self._bar.display.start()
        self._bar.search(0, None, "")

    def expected(self, forecast: str) -> None:
        """Print it on standard error, where there is a bar."""
        if not self._bar.display.disable:
            self._bar.display.console.print(f"Expected: {forecast}", highlight=False)

    def searched(self, num_runs: int, most_runs: int | None, best: str) -> None:
        """Move the bar of the search."""
        self._bar.search(num_runs, most_runs, best)

    @contextmanager
    def shown(self) -> Iterator[ReplayDisplay]:
        """Show the bar while the replay runs; what a model prints goes to standard error."""
        try:
            with _streams_apart(), self._bar.display:
                yield self
        finally:
            if self._output.file is not sys.stdout:
                self._output.file.close()


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
            import ctypes

            ctypes.CDLL(None).fflush(None)
        os.dup2(saved, descriptor)
        os.close(saved)


def progress_shown(*, quiet: bool = False) -> AbstractContextManager[ReplayDisplay]:
    """A bar on standard error, gone when the work is done; nothing where standard error is not a terminal."""
    return ReplayDisplay(quiet=quiet, tells=False).shown()


def print_as(report: Report, form: str, *, told: bool, has_page: bool) -> None:
    """Print the report in this form, JSON apart; where its first part was `told` already, the rest."""
    from nandoctor.renderers.answer import LINES
    from nandoctor.renderers.terminal import print_report

    if form in LINES:
        click.echo(LINES[form](report))
    elif form == "full":
        print_report(report, console(), told=told, has_page=has_page)
