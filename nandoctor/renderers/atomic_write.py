"""Writes a file whole or not at all, and knows the files that nandoctor wrote."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from nandoctor.errors import NanDoctorError

MARK = "nandoctor"
"""Stands near the beginning or the end of every file that nandoctor writes."""

_SCRIPT_MARK = "made by  nandoctor "
"""People's own scripts name nandoctor as well; this is what a script of `nandoctor repro` says of itself."""

_LOOKED_AT = 1 << 14


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
            remedy="Name a file in a folder that exists and that you may write to.",
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
