"""The defaults of a replay from the project's pyproject.toml."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from nandoctor.errors import NanDoctorError
from nandoctor.replaying.settings import Settings, override
from nandoctor.text import brief


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
    for matching in _matching_tables(Path(os.path.realpath(dump)), table.pop("dumps", []), project):
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
        if path.is_file() and not _may_be_anybodys(path) and _read_table(path):
            return path
    return None


def _may_be_anybodys(path: Path) -> bool:
    """Tell whether another user wrote a file where everyone may write, as in /tmp: its settings name code to run."""
    if not hasattr(os, "geteuid") or not path.parent.stat().st_mode & stat.S_IWOTH:
        return False
    return path.stat().st_uid not in (0, os.geteuid())


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # ValueError: no TOML, no UTF-8, a number too long
        raise NanDoctorError(
            f"{path} cannot be read as TOML: {brief(str(error))}", remedy="Correct the file and run again."
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
