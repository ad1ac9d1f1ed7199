"""The command line's options; those of a replay are made from `Settings`, so that they cannot differ from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from nandoctor.dumps.recorded_format import read_option
from nandoctor.errors import NanDoctorError
from nandoctor.step.settings import OPTIONS, Option, OptionGroup, check_setting
from nandoctor.views.save import check_ending, is_replaceable

Verb = Callable[..., None]

MODEL_AND_STEP: tuple[OptionGroup, ...] = ("model", "step")


def settings_options(*groups: OptionGroup, without: str = "") -> Callable[[Verb], Verb]:
    """Add the options of these groups to a verb; it gets each by its name in `Settings`, None if it was not given."""

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
    try:
        check_setting(name, value)
    except NanDoctorError as error:
        raise click.BadParameter(f"{error.message} {error.remedy}") from error
    return value


def _parse_argument(text: str) -> tuple[str, Any]:
    """Parse K=V, where V is a Python literal if it reads as one, else a string."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not K=V.")
    return name, read_option(value)


def check_replaceable(file: Path) -> None:
    """Refuse to overwrite a file that nandoctor did not write, and one of another kind, as a dump, by a link to it."""
    if file.exists() and (not is_replaceable(file) or file.resolve().suffix != file.suffix):
        raise click.BadParameter(f"{file} exists, and nandoctor did not write it: name another file, or remove it.")


def file_option(name: str, endings: Sequence[str], about: str, *, multiple: bool = False) -> Callable[[Verb], Verb]:
    """Return the option -o, which checks before the replay that its files can be written after it, and may be."""

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
