"""Keeps the imports of a dump from another folder to the files that were recorded.

The file that a dump names is not all that runs: it imports others, by names that any file of this folder may have.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from nandoctor.errors import ModelError
from nandoctor.source_files import SourceHash, is_installed, shown_path
from nandoctor.text import brief


class RecordedImports(MetaPathFinder):
    """An import hook that runs a file only if it is as recorded, or on the import path that Python was started with.

    The working directory does not count as a part of that path, and nothing below it but installed packages.
    """

    def __init__(self, sources: Mapping[str, SourceHash], remedy: str) -> None:
        self._sources = sources
        self._remedy = remedy
        self._here = Path.cwd().resolve()
        entries = [Path(entry).resolve() for entry in sys.path]
        self._trusted = [entry for entry in entries if not entry.is_relative_to(self._here) or is_installed(entry)]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module with a loader that checks its file; None if it is to be imported as usual."""
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or fullname.partition(".")[0] == "nandoctor":
            return None
        file = Path(spec.origin)
        if self._is_trusted(file.resolve()):
            return None
        spec.loader = self.loader_of(fullname, file)
        return spec

    def loader_of(self, module: str, file: Path) -> SourceFileLoader:
        """Return a loader that raises ModelError if the file is not as recorded."""
        recorded = self._sources.get(shown_path(file))
        why = "which has changed since the training" if recorded else "whose source was not recorded"
        refusal = ModelError(
            f"The dump's code imports {brief(shown_path(file))}, {why}, and this is not the folder of the training.",
            remedy=self._remedy,
        )
        return _RecordedLoader(module, str(file), recorded.sha256 if recorded else "", refusal)

    def _is_trusted(self, file: Path) -> bool:
        is_here = file.is_relative_to(self._here)
        return any(file.is_relative_to(entry) for entry in self._trusted if entry.is_relative_to(self._here) == is_here)


class _RecordedLoader(SourceFileLoader):
    """Compiles the source that it has checked, and reads no bytecode, which may be of another source."""

    def __init__(self, module: str, file: str, sha256: str, refusal: ModelError) -> None:
        super().__init__(module, file)
        self._sha256 = sha256
        self._refusal = refusal

    def get_code(self, fullname: str) -> CodeType:
        data = self.get_data(self.path)
        if hashlib.sha256(data).hexdigest() != self._sha256:
            raise self._refusal
        code: CodeType = self.source_to_code(data, self.path)
        return code
