"""The folder that a run's dumps are written to, and the log's sentence about each."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nandoctor.dumps.writer import fit_into, remove_orphans, write_dump


class DumpFolder:
    """The last `keep` files of one run, each at most `max_nbytes` long; other files are left alone."""

    def __init__(self, folder: Path, *, keep: int, max_nbytes: int) -> None:
        self.folder = folder
        self.written: list[Path] = []
        with suppress(OSError):
            remove_orphans(folder)  # left by an earlier run that was killed
        self._keep, self._max_nbytes = keep, max_nbytes

    @property
    def is_full(self) -> bool:
        """True if the next file will replace the oldest."""
        return len(self.written) >= self._keep

    def write(self, contents: Mapping[str, Any], stem: str) -> tuple[Path, Mapping[str, Any]]:
        """Write a file and delete the oldest beyond `keep`; return the path and the contents that fitted.

        Raises:
            OSError: the folder cannot be written to, or the disk is full.
        """
        fitting = fit_into(contents, self._max_nbytes)
        path = write_dump(fitting, self.folder, stem, max_nbytes=self._max_nbytes)
        self.written.append(path)
        while len(self.written) > self._keep:
            with suppress(OSError):
                self.written.pop(0).unlink(missing_ok=True)
        return path, fitting


def say_next(path: Path, written: Mapping[str, Any], flags: str | None) -> str:
    """Return what was saved and the command that replays it; if `flags` is None, the Python call for this notebook."""
    lost = [part for part in ("calls", "state_dict") if part not in written]
    if lost:
        what = {"calls": "the model's arguments", "state_dict": "the buffers"}[lost[0]]
        return f"Saved to {path} without {what}: it cannot be replayed. Raise max_nbytes of the Recorder."
    if flags is None:
        return f"Saved to {path}; next, here: nandoctor.replay({str(path)!r})"
    start = os.environ.get("PWD")  # the folder of the shell that started this process, which may have left it since
    if start is not None and Path(start).resolve() != Path.cwd():
        path = path.absolute()
    command = f"next: nandoctor replay {shlex.quote(str(path))}{flags}"
    if "checkpoint" not in written:
        return f"Saved to {path}; {command}"
    command += " --weights CHECKPOINT"
    return f"Saved to {path}, without the weights, which would exceed max_nbytes; {command}"
