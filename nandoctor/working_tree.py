"""Applies a fix to the working tree: every file whole or not at all, and back again where it does not help.

The diff is applied strictly: every line of it that is context or removed has to stand where the diff says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nandoctor.errors import NanDoctorError
from nandoctor.renderers.save import write_bytes
from nandoctor.source_files import PACKAGE_FOLDERS, decode_source

_FILE = re.compile(r"^--- .*\n\+\+\+ (?:b/)?(.*)\n?", re.MULTILINE)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


class PatchError(NanDoctorError):
    """A patch cannot be applied to the files as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedFile:
    """One file: its bytes as they are, and as they will be."""

    path: Path
    before: bytes
    after: bytes

    @property
    def line(self) -> int:
        """The first line that differs, from 1."""
        pairs = zip(self.before.splitlines(), self.after.splitlines(), strict=False)
        return next((place for place, (was, now) in enumerate(pairs, 1) if was != now), 1)


def plan_patch(diff: str, root: Path, *, allow_installed: bool = False) -> tuple[PatchedFile, ...]:
    """Read the files below `root` that the diff names, and what becomes of each; nothing is written.

    Raises:
        PatchError: a file is missing or has changed since, is no text, or belongs to an installed package and
            `allow_installed` is not set.
    """
    _, *parts = _FILE.split(diff)
    files = zip(parts[::2], parts[1::2], strict=True)
    return tuple(_plan_file(name, hunks.split("\n"), root, allow_installed) for name, hunks in files)


def encode_diff(diff: str, root: Path) -> bytes:
    """The diff as bytes; the lines of a file in its own encoding, since `git apply` compares bytes."""
    heads = [*_FILE.finditer(diff)]
    ends = [*(head.start() for head in heads[1:]), len(diff)]
    parts = list[bytes]()
    for head, end in zip(heads, ends, strict=True):
        encoding = decode_source((root / head[1]).read_bytes())[1]
        parts += [head[0].encode(), diff[head.end() : end].encode(encoding)]
    return b"".join(parts)


def write_files(files: Sequence[PatchedFile]) -> None:
    """Write all files; where one cannot be written, those before it are put back.

    Raises:
        NanDoctorError: a file cannot be written, or is not as it was when the patch was planned.
    """
    for file in files:
        if file.path.read_bytes() != file.before:
            raise _changed_since(file.path)
    try:
        for file in files:
            write_bytes(file.after, file.path)
    except BaseException:
        restore_files(files)
        raise


def restore_files(files: Sequence[PatchedFile]) -> None:
    """Put back what `write_files` wrote; a file that somebody has changed in the meantime is left alone."""
    for file in files:
        if file.path.is_file() and file.path.read_bytes() == file.after:
            write_bytes(file.before, file.path)


def _plan_file(name: str, hunks: Sequence[str], root: Path, allow_installed: bool) -> PatchedFile:
    path = (root / name).resolve()
    if not allow_installed and not PACKAGE_FOLDERS.isdisjoint(path.parts):
        raise PatchError(
            f"{path} belongs to an installed package.",
            remedy="Take a fix of your own code with --pick N, send the patch to the package's authors, or add "
            "--allow-installed.",
        )
    try:
        before = path.read_bytes()
        text, encoding = decode_source(before)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PatchError(f"{path} cannot be read: {reason}.", remedy="Apply the patch by hand.") from error
    return PatchedFile(path=path, before=before, after=_apply(text, hunks, path).encode(encoding))


def _apply(text: str, hunks: Sequence[str], path: Path) -> str:
    """The text with the hunks made; a line of them ends as the diff says, which has the file's own line endings."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    made, place = list[str](), 0
    for line, following in zip(hunks, [*hunks[1:], ""], strict=True):
        whole = line[1:] + ("" if following.startswith("\\") else "\n")  # "\ No newline at end of file"
        if header := _HUNK.match(line):
            start = int(header[1]) - (header[2] != "0")
            if not place <= start <= len(lines):
                raise _changed_since(path)
            made += lines[place:start]
            place = start
        elif line.startswith(("-", " ")):
            if place >= len(lines) or lines[place] != whole:
                raise _changed_since(path)
            made += [whole] if line.startswith(" ") else []
            place += 1
        elif line.startswith("+"):
            made.append(whole)
    return "".join([*made, *lines[place:]])


def _changed_since(path: Path) -> PatchError:
    return PatchError(
        f"{path} is not as it was when the fix was found.",
        remedy="Run nandoctor fix again: it reads the file anew.",
    )
