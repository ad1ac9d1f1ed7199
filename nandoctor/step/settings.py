"""The settings of a replay: their names, values and meanings on the command line, in Python and in pyproject.toml."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_type_hints

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.codec import MisfitError, from_plain
from nandoctor.text import brief, dtype_name

if TYPE_CHECKING:
    import torch


OptionGroup = Literal["model", "step", "fixes"]
"""What a setting is about; each verb offers the groups that it uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting as the command line, Python, pyproject.toml and the docs know it.

    `holds` says in words what the field's type hint and `accepts` allow; `reads` parses the text after the flag.
    """

    group: OptionGroup
    flag: str
    help: str
    holds: str = "a name"
    accepts: Callable[[Any], bool] = lambda _: True
    reads: Callable[[str], Any] = str
    metavar: str = ""
    choices: tuple[str, ...] = ()


def _setting(group: OptionGroup, flag: str, text: str, *, default: Any = None, **more: Any) -> Any:
    """Build a field of `Settings` with its `Option` for the command line and the docs."""
    metadata = {"option": Option(group=group, flag=flag, help=text, **more)}
    made = {"default_factory": dict} if default == {} else {"default": default}
    return field(**made, metadata=metadata)


def _spec(group: OptionGroup, flag: str, text: str, holds: str) -> Any:
    return _setting(group, flag, text, metavar="SPEC", holds=holds)


def _choice(flag: str, text: str, *choices: str) -> Any:
    return _setting("step", flag, text, choices=choices, holds=f"one of {', '.join(choices)}")


def _switch(group: OptionGroup, flag: str, text: str, *, default: bool) -> Any:
    return _setting(group, flag, text, default=default, holds="true or false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a replay; None means that the replay finds out.

    `model` may also be a Module, in Python; `call` is `(model, batch) -> output`, `loss` is `(output, batch) ->
    scalar`; SPECs and paths are looked up from `directory`.
    """

    model: str | Callable[..., Any] | None = _spec(
        "model", "--model", "What builds the model: package.module:attr or file.py:attr.", "a SPEC"
    )
    model_args: Mapping[str, Any] = _setting(
        "model",
        "--model-arg",
        "An argument for the builder, also an object: K=file.py:NAME. May be repeated.",
        default={},
        metavar="K=V",
        holds="a table of names and values",
    )
    strict: bool = _switch("model", "--no-strict", "Load the weights that fit, leave the rest.", default=True)
    weights: str | None = _setting(
        "model",
        "--weights",
        "Take the weights from here: a checkpoint, a directory of one, or FILE:NAME of several in a file.",
        metavar="PATH",
        holds="a path",
    )
    inputs: tuple[str, ...] = _setting(
        "step",
        "--inputs",
        "Arrays to call it with: a,b or x=a,mask=b, or '*' for a dict.",
        default=(),
        metavar="A,B",
        holds="a list of names",
    )
    call: str | Callable[..., Any] | None = _spec(
        "step", "--call", "A function (model, batch) -> output that makes the call.", "a SPEC or a function"
    )
    loss: str | Callable[..., Any] | None = _spec(
        "step",
        "--loss",
        "A function (output, batch) -> scalar, or (output, mask) for an array called mask: also replays the "
        "backward pass.",
        "a SPEC or a function",
    )
    loss_scale: float | None = _setting(
        "step",
        "--loss-scale",
        "What multiplied the loss before the backward (default: the dump's).",
        metavar="S",
        holds="a number above 0",
        reads=float,
        accepts=lambda value: 0 < value < math.inf,
    )
    output: str | None = _setting("step", "--output", "The saved output to compare the replay with.", metavar="KEY")
    amp_dtype: Literal["float16", "bfloat16", "none"] | None = _choice(
        "--amp-dtype", "What autocast computed in (default: what fits the file best).", "float16", "bfloat16", "none"
    )
    policy: Literal["cuda", "native"] | None = _choice(
        "--policy", "CUDA's op lists (default), or torch's for the device.", "cuda", "native"
    )
    mode: Literal["train", "eval"] | None = _choice(
        "--mode", "Default: the dump's, else train and then eval.", "train", "eval"
    )
    device: str = _setting(
        "step",
        "--device",
        "Where to replay (default: cpu).",
        default="cpu",
        metavar="cpu|cuda",
        holds="cpu, cuda or cuda:N",
        accepts=lambda value: re.fullmatch(r"cpu|cuda(:\d+)?", value) is not None,
    )
    seed: int | None = _setting(
        "step",
        "--seed",
        "For dropout and the like (default: 0, then a few more).",
        metavar="N",
        holds="a whole number from 0 to 2**31 - 1",
        reads=int,
        accepts=lambda value: 0 <= value < 1 << 31,  # numpy takes 32 bits; the next few follow
    )
    fixes: bool = _switch("fixes", "--no-fixes", "Diagnose only; do not search for fixes.", default=True)
    max_trials: int | None = _setting(
        "fixes",
        "--max-trials",
        "Runs to spend on the search for fixes (default: 500; inf: no limit).",
        default=500,
        metavar="N",
        holds="a whole number, 0 or more, or inf",
        reads=lambda text: math.inf if text == "inf" else int(text),
        accepts=lambda value: value >= 0,
    )
    time: float | None = _setting(
        "fixes",
        "--time",
        "Time to spend on the search for fixes (default: 300; inf: no limit).",
        default=300.0,
        metavar="SECONDS",
        holds="a number of seconds, 0 or more, or inf",
        reads=float,
        accepts=lambda value: 0 <= value < math.inf,
    )
    directory: Path = field(default_factory=Path.cwd)


class StepOptions(TypedDict, total=False):
    """The settings of the model and of the failing step as passed in Python; None leaves one as it is."""

    model_args: Mapping[str, Any] | None
    strict: bool | None
    weights: str | os.PathLike[str] | None
    inputs: str | Sequence[str] | None
    call: str | Callable[..., Any] | None
    loss: str | Callable[..., Any] | None
    loss_scale: float | None
    output: str | None
    amp_dtype: str | torch.dtype | None
    policy: Literal["cuda", "native"] | None
    mode: Literal["train", "eval"] | None
    device: str | torch.device | None
    seed: int | None


class ReplayOptions(StepOptions, total=False):
    """All settings of a replay except the model."""

    fixes: bool | None
    max_trials: float | None
    time: float | None


OPTIONS: Mapping[str, Option] = {
    item.name: item.metadata["option"] for item in dataclasses.fields(Settings) if "option" in item.metadata
}
_HINTS = get_type_hints(Settings)


def check_setting(name: str, value: Any) -> Any:
    """Return the value of one setting as `Settings` stores it.

    `inputs` may be a list or a comma-separated string, a dtype or device torch's own, a limit inf, and any setting None
    whose default is None.

    Raises:
        NanDoctorError: there is no such setting, or it cannot have this value.
    """
    if name not in OPTIONS:
        raise NanDoctorError(f"There is no setting {name!r}.", remedy=f"The settings are: {', '.join(OPTIONS)}.")
    if name in ("max_trials", "time") and value == math.inf:
        return None
    value = _plain(name, value)
    if name in ("call", "loss") and callable(value):
        return value
    with suppress(MisfitError):
        fitting = from_plain(_HINTS[name], value, place=name)
        if fitting is None or OPTIONS[name].accepts(fitting):
            return fitting
    raise NanDoctorError(f"{name} cannot be {brief(repr(value))}.", remedy=f"It is {OPTIONS[name].holds}.")


def settings_for(dump: Path, options: Mapping[str, Any]) -> Settings:
    """Return the project's settings for this dump, overridden by the `options` that are not None, paths absolute."""
    given = {name: check_setting(name, value) for name, value in options.items() if value is not None}
    given |= {name: anchor(given[name]) for name in _SPECS if name in given}
    if "weights" in given:
        given["weights"] = str(Path(given["weights"]).absolute())
    return override(read_settings(dump), given)


def override(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """Return `settings` overridden by `options`; raise as `check_setting` does."""
    return dataclasses.replace(settings, **{name: check_setting(name, value) for name, value in options.items()})


_SPECS = ("model", "call", "loss")


def anchor(spec: Any) -> Any:
    """Make the file of a SPEC absolute, so that it does not depend on where the project's pyproject.toml is."""
    location, separator, attribute = spec.rpartition(":") if isinstance(spec, str) else ("", "", "")
    return f"{Path(location).absolute()}{separator}{attribute}" if location.endswith(".py") else spec


def _plain(name: str, value: Any) -> Any:
    """Return the value as `Settings` stores it; torch dtypes and devices go by their `str`, which needs no torch."""
    if name == "inputs" and isinstance(value, (str, list)):
        return tuple(str(item).strip() for item in (value.split(",") if isinstance(value, str) else value))
    if name in ("amp_dtype", "device") and value is not None:
        return dtype_name(value)
    if name == "weights" and isinstance(value, os.PathLike):
        return str(value)
    return value


def read_settings(dump: Path, *, start: Path | None = None) -> Settings:
    """Return the settings for this dump from `[tool.nandoctor]` in the nearest pyproject.toml at or above `start`.

    Tables in `[[tool.nandoctor.dumps]]` whose `pattern` matches the dump's path (relative to the project, or its bare
    name) override the general ones; the last match wins. Keys are the fields of `Settings`, with "-" or "_".

    Raises:
        NanDoctorError: the file is not TOML, or has an unknown key or an invalid value.
    """
    project, table = _find_project((start or Path.cwd()).resolve())
    if project is None:
        return Settings()
    real, entries = Path(os.path.realpath(dump)), table.pop("dumps", [])
    seen = str(real.relative_to(project.parent)) if real.is_relative_to(project.parent) else str(real)
    for entry in entries if isinstance(entries, list) else [entries]:
        pattern = entry.get("pattern") if isinstance(entry, dict) else None
        if not isinstance(pattern, str):
            raise NanDoctorError(
                f"{project}: a table of dumps has no pattern.",
                remedy='Write [[tool.nandoctor.dumps]] with pattern = "runs/*.pth" and the settings for these files.',
            )
        if fnmatch(seen, pattern) or fnmatch(real.name, pattern):
            table |= {key: value for key, value in entry.items() if key != "pattern"}
    options = {key.replace("-", "_"): value for key, value in table.items()}
    try:
        return override(Settings(directory=project.parent), options)
    except NanDoctorError as error:
        raise NanDoctorError(f"{project}, [tool.nandoctor]: {error.message}", remedy=error.remedy) from error


def _find_project(start: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the nearest pyproject.toml that has a `[tool.nandoctor]` table, and that table; (None, {}) if none has."""
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and not _is_untrusted(path) and (table := _read_table(path)):
            return path, table
    return None, {}


def _is_untrusted(path: Path) -> bool:
    """Return True if another user owns a file where everyone may write, as in /tmp: its settings name code to run."""
    if not hasattr(os, "geteuid") or not path.parent.stat().st_mode & stat.S_IWOTH:
        return False
    return path.stat().st_uid not in (0, os.geteuid())


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = _parse_toml(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # ValueError: not TOML, not UTF-8, or too long a number
        raise NanDoctorError(
            f"{path} cannot be read as TOML: {brief(str(error))}", remedy="Correct the file and run again."
        ) from error
    for key in ("tool", "nandoctor"):
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise NanDoctorError(f"{path}: {key} is not a table.", remedy="Write the settings under [tool.nandoctor].")
    return dict(table)


_parse_toml = lru_cache(maxsize=4)(tomllib.loads)  # called for each dump; a long file takes milliseconds
