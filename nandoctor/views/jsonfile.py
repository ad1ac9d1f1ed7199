"""Write records as JSON, and read reports back: the contract `nandoctor.report/2` that other tools read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nandoctor.changes import kinds  # noqa: F401 - a report is read with the kinds of changes
from nandoctor.errors import ReportError
from nandoctor.evidence.codec import MisfitError, from_plain, to_plain
from nandoctor.evidence.report import SCHEMA, Report

_MAX_NBYTES = 1 << 30
_REMEDY = "Make the report anew: nandoctor replay DUMP -o report.json."


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
    data = _parse(Path(path))
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ReportError(f"{path} is no report that this nandoctor reads: {schema!r}, not {SCHEMA!r}.", remedy=_REMEDY)
    try:
        return from_plain(Report, data)
    except MisfitError as error:
        raise ReportError(f"{path} is damaged: {error}", remedy=_REMEDY) from error


def _parse(path: Path) -> Any:
    try:
        if path.exists() and not path.is_dir() and (not path.is_file() or path.stat().st_size > _MAX_NBYTES):
            raise ReportError(f"{path} is a device or a pipe, or far too large for a report.", remedy=_REMEDY)
        # Bytes, not text: json detects UTF-8, UTF-16 or UTF-32 by itself, and PowerShell's `>` writes UTF-16.
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}.", remedy="Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not JSON.", remedy=_REMEDY) from error
