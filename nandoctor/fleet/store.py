"""The folder of a triage: one result for each file and settings, so that it can be stopped and resumed.

Every file in it is written whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

from nandoctor import __version__
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.codec import from_plain, to_json, to_plain
from nandoctor.evidence.triage import DumpResult
from nandoctor.fleet.worker import JobAnswer
from nandoctor.source_files import hash_of
from nandoctor.step.settings import Settings
from nandoctor.views.save import is_replaceable, write_text

PAGE = "index.html"
LINES = "triage.jsonl"
_RESULTS, _REPORTS = "results", "reports"
_KEY_DIGITS = 32


class Store:
    """The results of earlier runs, and a place for new ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        """Create the folder, or reuse one that a triage created.

        Raises:
            NanDoctorError: it holds other files, or it cannot be created.
        """
        written = [self.folder / name for name in (PAGE, LINES)]
        known = (self.folder / _RESULTS).is_dir() and all(map(is_replaceable, written))
        if self.folder.is_dir() and any(self.folder.iterdir()) and not known:
            raise NanDoctorError(
                f"{self.folder} holds files that nandoctor triage did not write.",
                remedy="Name another folder with -o.",
            )
        try:
            for name in (_RESULTS, _REPORTS):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NanDoctorError(
                f"The folder {self.folder} cannot be created: {error.strerror or error}.",
                remedy="Name another one with -o.",
            ) from error

    def key_of(self, path: Path, settings: Settings) -> str:
        """Return the key of the result for this file, as it is now, under these settings.

        The file is told by its path, size and time: no limit applies here, so nothing of it is read.

        Raises:
            OSError: it cannot be read, or is a device or a pipe.
        """
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
        file = [os.path.realpath(path), status.st_size, status.st_mtime_ns]
        parts = json.dumps([__version__, file, to_plain(settings)], sort_keys=True, default=str)
        return hashlib.sha256(parts.encode()).hexdigest()[:_KEY_DIGITS]

    def find(self, key: str) -> DumpResult | None:
        """Return the result of an earlier run; None if there is none, or the code that it came from has changed.

        What was not analysed is tried again: most failures come from the code or the environment.
        """
        try:
            result = from_plain(DumpResult, json.loads((self.folder / _RESULTS / f"{key}.json").read_bytes()))
            is_current = all(hash_of(Path(path)) == sha256 for path, sha256 in result.sources)
        except (OSError, ValueError):
            return None
        return result if result.outcome == "analysed" and is_current else None

    def keep(self, answer: JobAnswer) -> DumpResult:
        """Write a worker's answer; the result comes last, so that the files that it names are there."""
        result, name = answer.result, f"{_REPORTS}/{answer.result.key}"
        if answer.report:
            write_text(answer.report + "\n", self.folder / f"{name}.json")
            result = replace(result, report=f"{name}.json")
        if answer.page:
            write_text(answer.page, self.folder / f"{name}.html")
            result = replace(result, page=f"{name}.html")
        write_text(to_json(result) + "\n", self.folder / _RESULTS / f"{result.key}.json")
        return result
