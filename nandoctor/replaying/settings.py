"""How to replay: the options of the command line, and their defaults from the project's pyproject.toml.

In: a dump's path and a folder. Out: `Settings`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from nandoctor.errors import NanDoctorError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a replay can be told; None means: find out.

    `model`, `call` (`(model, batch) -> output`) and `loss` (`(output, batch) -> scalar`) are SPECs, looked up from
    `directory`; the last two may be functions as well. `loss_scale` multiplies the loss before the backward pass.
    `config` is the SPEC of a configuration class of transformers, to be filled with the values that the dump has;
    `method` the model's method that a recorded dump holds calls of, where that is not forward.
    `inputs` are array names, or `parameter=array` pairs. `mode` is "train" or "eval", `amp_dtype` "float16" or
    "bfloat16" (float16 where the dump does not say), `policy` "cuda" or "native" (CUDA's where it does not say).
    `per_sample` counts samples and exponents in every layer and keeps a small picture of the sample at fault. With
    `fixes` changes that fix the step are searched for, in at most `max_trials` runs and `time` seconds (None: no
    limit).
    """

    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None
    method: str | None = None
    inputs: tuple[str, ...] = ()
    call: str | Callable[..., Any] | None = None
    loss: str | Callable[..., Any] | None = None
    loss_scale: float | None = None
    output: str | None = None
    amp_dtype: str | None = None
    policy: Literal["cuda", "native"] | None = None
    mode: str | None = None
    device: str = "cpu"
    seed: int | None = None
    strict: bool = True
    per_sample: bool = False
    fixes: bool = True
    max_trials: int | None = 200
    time: float | None = 300.0
    directory: Path = field(default_factory=Path.cwd)


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Settings) if f.name != "directory"}
_CHOICES = {
    "amp_dtype": ("float16", "bfloat16"),
    "policy": ("cuda", "native"),
    "mode": ("train", "eval"),
}
_KINDS: dict[str, tuple[Any, str]] = {
    "model": (str, "a SPEC"),
    "model_args": (Mapping, "a table of names and values"),
    "config": (str, "a SPEC"),
    "method": (str, "the name of a method"),
    "inputs": (tuple, "a list of names"),
    "loss_scale": (int | float, "a number"),
    "output": (str, "the name of an array"),
    "device": (str, "the name of a device"),
    "seed": (int, "a whole number"),
    "strict": (bool, "true or false"),
    "per_sample": (bool, "true or false"),
    "fixes": (bool, "true or false"),
    "max_trials": (int | NoneType, "a whole number, 0 or more"),
    "time": (int | float | NoneType, "a number of seconds, 0 or more"),
}
_COUNTED = ("max_trials", "time")


def override(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """`settings` with `options` put over them.

    A list or a comma-separated string may stand for a tuple, a torch dtype or device for its name, and None where None
    is the default.

    Raises:
        NanDoctorError: there is no such option, or it cannot have this value.
    """
    plain = {name: _plain(name, value) for name, value in options.items()}
    for name, value in plain.items():
        _check(name, value)
    return dataclasses.replace(settings, **plain)


def _check(name: str, value: Any) -> None:
    if name not in _DEFAULTS:
        raise NanDoctorError(f"There is no setting {name!r}.", remedy=f"The settings are: {', '.join(_DEFAULTS)}.")
    if value is None and _DEFAULTS[name] is None:
        return
    if name in _CHOICES and value not in _CHOICES[name]:
        raise NanDoctorError(f"{name} cannot be {value!r}.", remedy=f"It is one of: {', '.join(_CHOICES[name])}.")
    kind, words = _KINDS.get(name, (object, ""))
    if not isinstance(value, kind) or (name in _COUNTED and isinstance(value, (int, float)) and value < 0):
        raise NanDoctorError(f"{name} cannot be {value!r}.", remedy=f"It is {words}.")


def read_settings(dump: Path, *, start: Path | None = None) -> Settings:
    """Defaults for this dump from `[tool.nandoctor]` in the nearest pyproject.toml at or above `start`.

    Tables in `[[tool.nandoctor.dumps]]` whose `pattern` matches the dump's path (as the project sees it, or its bare
    name) override the general ones, the last match last. Keys are the fields of `Settings`, with "-" or "_".

    Raises:
        NanDoctorError: the file is not TOML, or holds a key or value that means nothing.
    """
    project = _find_project((start or Path.cwd()).resolve())
    if project is None:
        return Settings()
    table = _read_table(project)
    for matching in _matching_tables(dump.resolve(), table.pop("dumps", []), project):
        table |= matching
    options = {key.replace("-", "_"): value for key, value in table.items()}
    try:
        return override(Settings(directory=project.parent), options)
    except NanDoctorError as error:
        raise NanDoctorError(f"{project}, [tool.nandoctor]: {error.message}", remedy=error.remedy) from error


def _find_project(start: Path) -> Path | None:
    """The nearest pyproject.toml that has a `[tool.nandoctor]` table."""
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and _read_table(path):
            return path
    return None


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise NanDoctorError(
            f"{path} is no readable TOML: {error}", remedy="PassingCase the file and run again."
        ) from error
    for key in ("tool", "nandoctor"):
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise NanDoctorError(f"{path}: {key} is no table.", remedy="Write the settings under [tool.nandoctor].")
    return dict(table)


def _matching_tables(dump: Path, entries: Any, project: Path) -> Iterator[dict[str, Any]]:
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not isinstance(entry.get("pattern"), str):
            raise NanDoctorError(
                f"{project}: a table of dumps has no pattern.",
                remedy='Write [[tool.nandoctor.dumps]] with pattern = "runs/*.pth" and the settings for these files.',
            )
        if _matches(dump, entry["pattern"], project.parent):
            yield {key: value for key, value in entry.items() if key != "pattern"}


def _matches(dump: Path, pattern: str, root: Path) -> bool:
    seen = str(dump.relative_to(root)) if dump.is_relative_to(root) else str(dump)
    return fnmatch(seen, pattern) or fnmatch(dump.name, pattern)


def _plain(name: str, value: Any) -> Any:
    """The value as `Settings` keeps it. A torch dtype or device is known by its `str`, so that torch is not needed."""
    if name == "inputs" and isinstance(value, (str, list)):
        return tuple(str(item).strip() for item in (value.split(",") if isinstance(value, str) else value))
    if name in ("amp_dtype", "device") and value is not None:
        return str(value).removeprefix("torch.")
    return value
