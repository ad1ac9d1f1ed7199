"""Write records as JSON, and read reports back: the contract `nandoctor.report/2` that other tools read."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from nandoctor.changes import kinds  # noqa: F401 - a report is read with the kinds of changes
from nandoctor.errors import ReportError
from nandoctor.evidence.codec import MisfitError, from_plain, to_plain
from nandoctor.evidence.report import SCHEMA, Report

_MAX_NBYTES = 1 << 30
_MAKE_ANEW = "The report was edited or cut short, or another tool wrote it: make a new one from the dump."
_WHAT_A_REPORT_IS = "A report is the .json file that `nandoctor replay -o report.json` writes."


def dumps(record: Any) -> str:
    """Return a record as JSON text, ASCII only: names may hold characters that a terminal or encoding cannot take."""
    return json.dumps(to_plain(record), indent=1, allow_nan=False)


def read_report(path: str | os.PathLike[str]) -> Report:
    """Read a saved report, without importing torch.

    Args:
        path: a file that `Case.save("report.json")` or `nandoctor replay -o report.json` wrote.

    Returns:
        The report as frozen records.

    Raises:
        ReportError: the file is not a report, or not one that this version can read.
    """
    data = _parse(path)
    _check_schema(data, path)
    try:
        return from_plain(Report, data)
    except MisfitError as error:
        raise ReportError(f"{path} is damaged: {error}", remedy=_MAKE_ANEW) from error


def _parse(path: str | os.PathLike[str]) -> Any:
    try:
        status = Path(path).stat()
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_NBYTES:
            raise OSError(errno.EINVAL, "it is not a regular file, or far too large for a report")
        # Bytes, not text: json detects UTF-8, UTF-16 or UTF-32 by itself, and PowerShell's `>` writes UTF-16.
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ReportError(
            f"{path} cannot be read: {error.strerror or error}.", remedy="Check the path of the saved report."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not JSON.", remedy=_WHAT_A_REPORT_IS) from error


def _check_schema(data: Any, path: str | os.PathLike[str]) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == SCHEMA:
        return
    family, _, version = SCHEMA.partition("/")
    found, _, other = str(schema).partition("/")
    if found != family or not other.isdecimal():
        raise ReportError(
            f"{path} is not a nandoctor report: its schema is {schema!r}, not {SCHEMA!r}.", remedy=_WHAT_A_REPORT_IS
        )
    age, remedy = "an older", "Replay the dump again: nandoctor replay DUMP -o report.json."
    if int(other) > int(version):
        age, remedy = "a newer", "Upgrade nandoctor, or make the report again with this version."
    raise ReportError(
        f"{path} was written by {age} nandoctor: its schema is {schema}, this version reads {SCHEMA}.", remedy=remedy
    )
