"""Changes as a person reads, and a program runs them: patches of source files, and snippets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SnippetScope = Literal["snippet", "state", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """One file: its absolute path, and the whole text before and after."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePatch:
    """New text for one or more files below `root`, the folder that `git apply -p1` is to be run in."""

    root: str
    files: tuple[ChangedFile, ...]

    @property
    def diff(self) -> str:
        """The patch as a unified diff with paths below `root`."""
        return "".join(_unified_diff(file, Path(self.root)) for file in self.files)

    @property
    def undone(self) -> SourcePatch:
        """The patch that takes this one back."""
        files = (ChangedFile(path=file.path, before=file.after, after=file.before) for file in self.files)
        return SourcePatch(root=self.root, files=tuple(files))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """Python that is run with `model` in scope before the step, or with `batch` where the kind is "data".

    `takes_samples` tells that the batch has fewer samples after it.
    """

    kind: SnippetScope
    text: str
    takes_samples: bool = False


PrintedChange = SourcePatch | Snippet


@dataclass(frozen=True, slots=True, kw_only=True)
class FixCost:
    """What a fix moves from low precision to fp32, as shares of the step's forward.

    `products_in_fp32` counts multiply-adds, which tensor cores do in low precision; `more_activations` the bytes that
    its ops' results take more.
    """

    products_in_fp32: float
    more_activations: float


def _unified_diff(file: ChangedFile, root: Path) -> str:
    name = Path(file.path).relative_to(root).as_posix()
    old, new = (text.splitlines(keepends=True) for text in (file.before, file.after))
    lines = difflib.unified_diff(old, new, fromfile=f"a/{name}", tofile=f"b/{name}")
    # https://www.gnu.org/software/diffutils/manual/html_node/Incomplete-Lines.html
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
