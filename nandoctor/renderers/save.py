"""Writes files whole or not at all, and a report in the form that the ending of its file asks for.

Each renderer is imported only when its ending is asked for.
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
"""Stands near the beginning or the end of every file that nandoctor writes."""
_SCRIPT_MARK = "made by  nandoctor "
"""People's own scripts name nandoctor as well; this is what a script of `nandoctor repro` says of itself."""
_LOOKED_AT = 1 << 14
PICTURE_ENDINGS = (".png", ".svg", ".pdf")
_TEXTS = {
    ".html": ("page", "report_page", ""),
    ".md": ("markdown", "report_markdown", f"\n<!-- {MARK} -->\n"),
    ".json": ("jsonfile", "dumps", "\n"),
}
"""By ending, the module of this package, its function that makes a text of a report, and what stands after that."""
ENDINGS = (*_TEXTS, *PICTURE_ENDINGS)


def save_report(report: Report, path: Path) -> None:
    """Write the page (.html), Markdown (.md), the report (.json) or the ranges plot (.png, .svg, .pdf).

    Raises:
        NanDoctorError: the ending is another one, there is nothing to draw, or the file cannot be written.
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
            remedy="The ending of the name says what is written.",
        )


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write the file; a reader sees the old one or the whole new one. Raises NanDoctorError if it cannot."""
    write_bytes(text.encode("utf-8", "backslashreplace"), path)


def write_bytes(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write the file; a reader sees the old one or the whole new one. Raises NanDoctorError if it cannot."""
    target = Path(os.path.realpath(path))  # through links: the file they name is replaced, not the link
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
            remedy="Name a file in a folder that exists, that you may write to, and that has room.",
        ) from error


def is_replaceable(path: Path) -> bool:
    """Tell whether nothing is lost where this file is written: there is none, or nandoctor wrote it."""
    try:
        with path.open("rb") as file:
            head = file.read(_LOOKED_AT)
            file.seek(max(file.seek(0, os.SEEK_END) - _LOOKED_AT, 0))
            ours = _SCRIPT_MARK if path.suffix == ".py" else MARK
            return ours.encode() in head + file.read()
    except FileNotFoundError:
        return True
    except OSError:
        return False
