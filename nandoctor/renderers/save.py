"""Write files atomically, and a report in the format of its file's extension.

Each renderer is imported only when it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from nandoctor.errors import NanDoctorError
from nandoctor.text import join_words

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report

MARK = "nandoctor"
"""A word near the beginning or the end of every file that nandoctor writes."""
_SCRIPT_MARK = "made by  nandoctor "
"""Marks a script of `nandoctor repro`; users' own scripts mention nandoctor too."""
_SCANNED_NBYTES = 1 << 14
PICTURE_ENDINGS = (".png", ".svg", ".pdf")
_TEXTS = {
    ".html": ("page", "report_page", ""),
    ".md": ("markdown", "report_markdown", f"\n<!-- {MARK} -->\n"),
    ".json": ("jsonfile", "dumps", "\n"),
}
"""By extension: the module of this package, its function that renders a report, and the text appended to that."""
ENDINGS = (*_TEXTS, *PICTURE_ENDINGS)


def save_report(report: Report, path: Path) -> None:
    """Write the page (.html), Markdown (.md), the report (.json) or the ranges plot (.png, .svg, .pdf).

    Raises:
        NanDoctorError: the extension is unknown, there is nothing to draw, or the file cannot be written.
    """
    check_ending(path, ENDINGS)
    if path.suffix.lower() in PICTURE_ENDINGS:
        figures, kinds = (import_module(f"nandoctor.renderers.plots.{name}") for name in ("figures", "kinds"))
        figures.save_figure(kinds.draw(report, "ranges"), path)
    else:
        module, function, end = _TEXTS[path.suffix.lower()]
        write_text(getattr(import_module(f"nandoctor.renderers.{module}"), function)(report) + end, path)


def check_ending(path: Path, endings: Sequence[str]) -> None:
    """Raise NanDoctorError if the path ends in none of `endings`."""
    if path.suffix.lower() not in endings:
        raise NanDoctorError(
            f"{path}: unknown ending; use {join_words(endings, 'or')}.",
            remedy="The ending of the name decides what is written.",
        )


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write the file atomically: readers see the old file or the whole new one. Raise NanDoctorError on failure."""
    write_bytes(text.encode("utf-8", "backslashreplace"), path)


def write_bytes(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write the file atomically: readers see the old file or the whole new one. Raise NanDoctorError on failure."""
    target = Path(os.path.realpath(path))  # a link's target is replaced, not the link
    draft = target.with_name(f".nandoctor-{os.urandom(8).hex()}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(data)
        if target.exists():
            draft.chmod(target.stat().st_mode & 0o7777)
        draft.replace(target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise NanDoctorError(
            f"The file cannot be written to {path}: {error.strerror or error}.",
            remedy="Name a file in an existing, writable folder with free space.",
        ) from error


def is_replaceable(path: Path) -> bool:
    """Return True if overwriting the file loses nothing: it does not exist, or nandoctor wrote it."""
    try:
        with path.open("rb") as file:
            head = file.read(_SCANNED_NBYTES)
            file.seek(max(file.seek(0, os.SEEK_END) - _SCANNED_NBYTES, 0))
            ours = _SCRIPT_MARK if path.suffix.lower() == ".py" else MARK
            return ours.encode() in head + file.read()
    except FileNotFoundError:
        return True
    except OSError:
        return False
