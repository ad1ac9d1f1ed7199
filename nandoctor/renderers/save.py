"""Writes a report to a file, in the form that the file's ending asks for.

Each renderer is imported only when its ending is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from nandoctor.errors import NanDoctorError

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report


PICTURE_ENDINGS = (".png", ".svg", ".pdf")
_WRITERS = {
    ".html": ("page", "write_page"),
    ".md": ("markdown", "write_markdown"),
    ".json": ("jsonfile", "write_json"),
    **dict.fromkeys(PICTURE_ENDINGS, ("plots.figures", "write_ranges")),
}
"""By ending, the module of this package and its function of a report and a path."""
ENDINGS = tuple(_WRITERS)


def save_report(report: Report, path: Path) -> None:
    """Write the page (.html), Markdown (.md), the report (.json) or the ranges plot (.png, .svg, .pdf).

    Raises:
        NanDoctorError: the ending is another one, there is nothing to draw, or the file cannot be written.
    """
    check_ending(path, ENDINGS)
    module, function = _WRITERS[path.suffix.lower()]
    getattr(import_module(f"nandoctor.renderers.{module}"), function)(report, path)


def check_ending(path: Path, endings: Sequence[str]) -> None:
    """Raise NanDoctorError if the path ends in none of `endings`."""
    if path.suffix.lower() not in endings:
        choice = " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
        raise NanDoctorError(
            f"{path}: unknown ending; use {choice}.", remedy="The ending of the name says what is written."
        )
