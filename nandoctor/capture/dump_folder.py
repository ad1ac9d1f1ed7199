"""The folder that a run's dumps are written to, and the log's sentence about each."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nandoctor.capture.source_info import is_typed
from nandoctor.dumps.writer import remove_orphans, write_dump


class DumpFolder:
    """The last `keep` files of one run; other files are left alone."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self.written: list[Path] = []
        with suppress(OSError):
            remove_orphans(folder)  # left by an earlier run that was killed
        self._keep = keep

    @property
    def is_full(self) -> bool:
        """True if the next file will replace the oldest."""
        return len(self.written) >= self._keep

    def write(self, contents: Mapping[str, Any], stem: str) -> Path:
        """Write a file and delete the oldest beyond `keep`; return the path.

        Raises:
            OSError: the folder cannot be written to, or the disk is full.
        """
        path = write_dump(contents, self.folder, stem)
        self.written.append(path)
        while len(self.written) > self._keep:
            with suppress(OSError):
                self.written.pop(0).unlink(missing_ok=True)
        return path


def say_next(path: Path, written: Mapping[str, Any]) -> str:
    """Return what was saved and the command that replays it, or the call in this notebook if it defines the model."""
    if is_typed(written["model"]):
        return f"Saved to {path}; next, here: nandoctor.replay({str(path)!r})"
    start = os.environ.get("PWD")  # the folder of the shell that started this process, which may have left it since
    if start is not None and Path(start).resolve() != Path.cwd():
        path = path.absolute()
    command = f"next: nandoctor replay {shlex.quote(str(path))}"
    if "checkpoint" not in written:
        return f"Saved to {path}; {command}"
    command += " --weights CHECKPOINT"
    return f"Saved to {path}, without the weights, which would exceed max_nbytes; {command}"
