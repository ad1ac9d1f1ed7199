"""Writes a report to a file, in the form that the file's ending asks for.

Each renderer is imported only when its ending is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nandoctor.errors import NanDoctorError

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report


def _write_page(report: Report, path: Path) -> None:
    from nandoctor.renderers.page import write_page

    write_page(report, path)


def _write_markdown(report: Report, path: Path) -> None:
    from nandoctor.renderers.markdown import write_markdown

    write_markdown(report, path)


def _write_json(report: Report, path: Path) -> None:
    from nandoctor.renderers.jsonfile import write_json

    write_json(report, path)


def _draw_ranges(report: Report, path: Path) -> None:
    from nandoctor.renderers.plots.figures import draw_ranges, save_figure

    save_figure(draw_ranges(report), path)


PICTURE_ENDINGS = (".png", ".svg", ".pdf")
_WRITERS: Mapping[str, Callable[[Report, Path], None]] = {
    ".html": _write_page,
    ".md": _write_markdown,
    ".json": _write_json,
    **dict.fromkeys(PICTURE_ENDINGS, _draw_ranges),
}
ENDINGS = tuple(_WRITERS)


def save_report(report: Report, path: Path) -> None:
    """Write the page (.html), Markdown (.md), the report (.json) or the ranges plot (.png, .svg, .pdf).

    Raises:
        NanDoctorError: the ending is another one, there is nothing to draw, or the file cannot be written.
    """
    check_ending(path, ENDINGS)
    _WRITERS[path.suffix.lower()](report, path)


def check_ending(path: Path, endings: Sequence[str]) -> None:
    """Raise NanDoctorError if the path ends in none of `endings`."""
    if path.suffix.lower() not in endings:
        choice = " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
        raise NanDoctorError(
            f"{path}: unknown ending; use {choice}.", remedy="The ending of the name says what is written."
        )
