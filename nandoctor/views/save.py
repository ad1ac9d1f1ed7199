"""Write files atomically, and a report in the format of its file's extension.

What draws a report is imported only when one is drawn: other commands write files too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.codec import to_json
from nandoctor.text import join_words

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report

MARK = "nandoctor"
"""A word near the beginning or the end of every file that nandoctor writes."""
_MARKS = {".py": "made by  nandoctor ", ".md": f"<!-- {MARK} -->"}
"""The marks of scripts and of Markdown by their endings: users' own mention nandoctor too."""
_SCANNED_NBYTES = 1 << 14
PICTURE_ENDINGS = (".png", ".svg", ".pdf")
ENDINGS = (".html", ".md", ".json", *PICTURE_ENDINGS)


def save(report: Report, path: Path) -> None:
    """Write the page (.html), Markdown (.md), the data (.json) or the plot of a report (.png, .svg, .pdf).

    Raises:
        NanDoctorError: as by `check_target`, or there is nothing to draw, or the file cannot be written.
    """
    from nandoctor.views.report import report_document

    check_target(path, ENDINGS)
    ending = path.suffix.lower()
    if ending in PICTURE_ENDINGS:
        from nandoctor.views.ranges import draw_ranges, image_of

        write_bytes(image_of(draw_ranges(report), ending[1:]), path)
    elif ending == ".json":
        write_text(f"{to_json(report)}\n", path)
    elif ending == ".html":
        from nandoctor.views.html import page_of

        write_text(page_of(report_document(report, "page")), path)
    else:
        from nandoctor.views.markdown import draw_markdown

        write_text(f"{draw_markdown(report_document(report, 'page'))}\n{_MARKS['.md']}\n", path)


def check_target(path: Path, endings: Sequence[str]) -> None:
    """Raise NanDoctorError if the path has another ending, no folder, or is a file of another kind or maker."""
    if path.suffix.lower() not in endings:
        raise NanDoctorError(
            f"{path}: unknown ending; use {join_words(endings, 'or')}.",
            remedy="The ending of the name decides what is written.",
        )
    if path.exists() and (not is_replaceable(path) or path.resolve().suffix != path.suffix):
        raise NanDoctorError(
            f"{path} exists, and nandoctor did not write it.", remedy="Name another file, or remove it."
        )
    if not path.parent.is_dir():
        raise NanDoctorError(f"There is no folder {path.parent}.", remedy="Create it, or name a file in another one.")


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
            return _MARKS.get(path.suffix.lower(), MARK).encode() in head + file.read()
    except FileNotFoundError:
        return True
    except OSError:
        return False
