"""The folder of a triage: one result for each content and setting, so that it can be stopped and taken up again.

Every file in it is written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

from nandoctor import __version__
from nandoctor.errors import NanDoctorError, ReportError
from nandoctor.evidence.serialization import from_plain
from nandoctor.evidence.triage import DumpResult
from nandoctor.fleet.worker import JobAnswer, unchanged
from nandoctor.renderers.jsonfile import dumps
from nandoctor.renderers.save import is_replaceable, write_text
from nandoctor.replaying.settings import Settings
from nandoctor.source_files import hash_of

PAGE = "index.html"
LINES = "triage.jsonl"
_RESULTS, _REPORTS = "results", "reports"
_KEY_DIGITS = 16
_END_NBYTES = 64 << 20


class Store:
    """The results that are there already, and a place for new ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hashes: dict[Path, str] = {}

    def open(self, *, force: bool = False) -> None:
        """Make the folder, or take over one that a triage made.

        Raises:
            NanDoctorError: it holds other files and `force` is not set, or cannot be made.
        """
        written = [self.folder / name for name in (PAGE, LINES)]
        known = (self.folder / _RESULTS).is_dir() and all(map(is_replaceable, written))
        if self.folder.exists() and not self.folder.is_dir():
            raise NanDoctorError(f"{self.folder} is a file.", remedy="Name another folder with -o.")
        if self.folder.is_dir() and any(self.folder.iterdir()) and not (known or force):
            raise NanDoctorError(
                f"{self.folder} holds files that nandoctor triage did not write.",
                remedy="Name another folder with -o, or add --force.",
            )
        try:
            for name in (_RESULTS, _REPORTS):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NanDoctorError(
                f"The folder {self.folder} cannot be created: {error.strerror or error}.",
                remedy="Name another one with -o.",
            ) from error

    def key_of(self, path: Path, settings: Settings, *, trust: bool) -> str:
        """What names the result of this file's content under these settings. Raises OSError."""
        if path not in self._hashes:
            self._hashes[path] = identify(path)
        told = json.dumps(
            [__version__, trust, {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}],
            sort_keys=True,
            default=str,
        )
        return f"{self._hashes[path][:32]}-{hashlib.sha256(told.encode()).hexdigest()[:_KEY_DIGITS]}"

    def find(self, key: str) -> DumpResult | None:
        """The result of an earlier run; None where there is none, or the code that it came from has changed since."""
        try:
            data = json.loads((self.folder / _RESULTS / f"{key}.json").read_bytes())
            result = from_plain(DumpResult, data)
        except (OSError, ValueError, ReportError):
            return None
        return result if unchanged(result.sources) else None

    def keep(self, answer: JobAnswer) -> DumpResult:
        """Write what a worker gave; the result comes last, so that what it names is there."""
        result, name = answer.result, f"{_REPORTS}/{answer.result.key}"
        if answer.report:
            write_text(answer.report + "\n", self.folder / f"{name}.json")
            result = replace(result, report=f"{name}.json")
        if answer.page:
            write_text(answer.page, self.page_of(result.key))
        write_text(dumps(result) + "\n", self.folder / _RESULTS / f"{result.key}.json")
        return result

    def page_of(self, key: str) -> Path:
        """Where the page of a result belongs."""
        return self.folder / _REPORTS / f"{key}.html"


def identify(path: Path) -> str:
    """The sha256 of a file, in hexadecimal; of a large one that of its size, its time and both ends.

    It is asked for outside of every time limit. At the end of an archive stand the checksums of all its parts.

    Raises:
        OSError: it cannot be read, or is a device or a pipe.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
    if status.st_size <= 2 * _END_NBYTES:
        return hash_of(path)
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    with path.open("rb") as file:
        digest.update(file.read(_END_NBYTES))
        file.seek(-_END_NBYTES, os.SEEK_END)
        digest.update(file.read(_END_NBYTES))
    return digest.hexdigest()
