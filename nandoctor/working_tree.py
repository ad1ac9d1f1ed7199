"""Applies a fix to the working tree, all files or none, and takes it back if it does not help."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.edits import ChangedFile
from nandoctor.source_files import PACKAGE_FOLDERS, decode_source
from nandoctor.views.save import write_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedFile:
    """One file: its bytes before and after the patch."""

    path: Path
    before: bytes
    after: bytes


def write_patch(files: Sequence[ChangedFile], *, allow_installed: bool = False) -> tuple[PatchedFile, ...]:
    """Write all files, once each was read and found as it was; if one cannot be written, restore those before it.

    Raises:
        NanDoctorError: a file is missing, has changed since or is not text, or it belongs to an installed package and
            `allow_installed` is not set; or it cannot be written.
    """
    planned = tuple(_plan_file(file, allow_installed) for file in files)
    try:
        for file in planned:
            _write(file.after, file.path)
    except BaseException:
        restore_files(planned)
        raise
    return planned


def restore_files(files: Sequence[PatchedFile]) -> None:
    """Undo `write_patch`; a file that was changed in the meantime is left alone."""
    for file in files:
        if file.path.is_file() and file.path.read_bytes() == file.after:
            _write(file.before, file.path)


def _write(source: bytes, path: Path) -> None:
    """Write the file and delete its bytecode, which Python accepts for any source of the same size and second."""
    write_bytes(source, path)
    with suppress(OSError, NotImplementedError):
        Path(cache_from_source(path)).unlink()


def _plan_file(file: ChangedFile, allow_installed: bool) -> PatchedFile:
    path = Path(file.path).resolve()
    if not allow_installed and not PACKAGE_FOLDERS.isdisjoint(path.parts):
        raise NanDoctorError(
            f"{path} belongs to an installed package.",
            remedy="Take a fix of your own code with --pick N, send the patch to the package's authors, or add "
            "--allow-installed.",
        )
    try:
        before = path.read_bytes()
        text, encoding = decode_source(before)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NanDoctorError(f"{path} cannot be read: {reason}.", remedy="Apply the patch by hand.") from error
    if text != file.before:
        raise NanDoctorError(
            f"{path} is not as it was when the fix was found.",
            remedy="Run nandoctor fix again: it reads the file anew.",
        )
    return PatchedFile(path=path, before=before, after=file.after.encode(encoding))
