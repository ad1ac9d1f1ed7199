"""Puts moments into files, and never lets a failure of its own reach the training.

In: what is to be written. Out: the path, or None and a warning in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nandoctor.dumps.writer import write_dump

LOG = logging.getLogger("nandoctor")


class Archive:
    """The files of one run: the last `keep`, none larger than `max_nbytes`; other files are left alone."""

    def __init__(self, folder: Path, *, keep: int, max_nbytes: int) -> None:
        self.folder = folder
        self.written: list[Path] = []
        self._keep, self._max_nbytes = keep, max_nbytes

    def write(self, make_contents: Callable[[], Mapping[str, Any]], stem: str) -> Path | None:
        """Write a file; whatever goes wrong is a line in the log, for the training has an error of its own."""
        try:
            path = write_dump(make_contents(), self.folder, stem, max_nbytes=self._max_nbytes)
        except Exception as error:
            LOG.warning("nandoctor could not save %s in %s (%s: %s).", stem, self.folder, type(error).__name__, error)
            return None
        self.written.append(path)
        self._forget()
        return path

    def _forget(self) -> None:
        while len(self.written) > self._keep:
            with suppress(OSError):
                self.written[0].unlink(missing_ok=True)
            del self.written[0]
