"""Applies a fix to the working tree, all files or none, so that it can be taken back if it does not help."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.util import cache_from_source
from pathlib import Path

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.edits import ChangedFile
from nandoctor.source_files import PACKAGE_FOLDERS, decode_source
from nandoctor.views.save import write_bytes


def write_patch(files: Sequence[ChangedFile], undo: ExitStack, *, allow_installed: bool = False) -> tuple[str, ...]:
    """Write all files, once each was read and found as it was, and return their paths; `undo` restores them.

    A file that was changed in the meantime is then left alone.

    Raises:
        NanDoctorError: a file is missing, has changed since or is not text, or it belongs to an installed package and
            `allow_installed` is not set; or it cannot be written.
    """
    planned = [_plan_file(file, allow_installed) for file in files]
    for path, before, after in planned:
        undo.callback(_restore, path, before, after)
        _write(after, path)
    return tuple(str(path) for path, *_ in planned)


def _restore(path: Path, before: bytes, after: bytes) -> None:
    if path.is_file() and path.read_bytes() == after:
        _write(before, path)


def _write(source: bytes, path: Path) -> None:
    """Write the file and delete its bytecode, which Python accepts for any source of the same size and second."""
    write_bytes(source, path)
    with suppress(OSError, NotImplementedError):
        Path(cache_from_source(path)).unlink()


def _plan_file(file: ChangedFile, allow_installed: bool) -> tuple[Path, bytes, bytes]:
    """Return the file's path, and its bytes before and after the change."""
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
    return path, before, file.after.encode(encoding)
