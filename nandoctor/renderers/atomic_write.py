"""Writes a text file whole or not at all.

In: text and a path. Out: the file, in UTF-8.
"""

from __future__ import annotations

import os
from pathlib import Path

from nandoctor.errors import NanDoctorError


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write the file; a reader sees the old one or the whole new one. Raises NanDoctorError if it cannot."""
    target = Path(path).resolve()  # through links: the file they name is replaced, not the link
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise NanDoctorError(
            f"The report cannot be written to {path}: {error.strerror or error}.",
            remedy="Name a file in a folder that exists and that you may write to.",
        ) from error
