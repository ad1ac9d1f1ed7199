"""Find what changed in the code since a dump was written, and take back what the caller knows of it.

A recorder's dump has hashes of the training's source files. Any other dump has only its modification time: newer files
count as changed. In a model that is already built, only function bodies can be reverted.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.evidence.verification import CodeChange, CodeState
from nandoctor.replaying.runner import FailingStep
from nandoctor.replaying.settings import Settings
from nandoctor.source_files import (
    SourceHash,
    changed_lines,
    decode_source,
    is_changed,
    is_installed,
    own_source,
    shown_path,
)

_MAX_FILES = 500
_MAX_HASHED_NBYTES = 64 << 20  # in total, which takes half a second
_BUILD = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"})


def find_changes(dump: Dump, step: FailingStep, settings: Settings, *, told: Sequence[Path] = ()) -> CodeState:
    """Compare the step's code with the training's; `told` lists files that the user says were changed."""
    of_model = _files_of(step.model)
    helpers = {path.resolve() for path in step.project.files(step.model)} - _named_by_user(settings)
    by_user = tuple(CodeChange(file=shown_path(path), known_by="user") for path in told)
    found = _compare_hashes(dump.recorded, of_model)
    found = found or _compare_times(dump.path, sorted(of_model | helpers)[:_MAX_FILES])
    changes = (*by_user, *(change for change in found.changes if change.file not in {one.file for one in by_user}))
    autocast, differing = dump.recorded.autocast, []
    if autocast is not None and settings.amp_dtype not in (None, autocast.dtype):
        differing.append(f"autocast in {settings.amp_dtype}, in the training in {autocast.dtype}")
    return replace(found, changes=changes, settings=tuple(differing))


def _files_of(model: nn.Module) -> set[Path]:
    """Return the project's own files that define the methods of the model's modules."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if base is not nn.Module}
    names = {_file_of(member) for kind in classes for member in vars(kind).values()} - {None}
    return {path.resolve() for path in map(Path, map(str, names)) if path.is_file() and not is_installed(path)}


def _named_by_user(settings: Settings) -> set[Path]:
    """Return the files of `--call` and `--loss`: they may have been written for the replay."""
    named = (settings.call, settings.loss)
    places = [item.rpartition(":")[0] if isinstance(item, str) else _file_of(item) for item in named]
    return {(settings.directory / place).resolve() for place in places if place}


def _file_of(item: Callable[..., Any] | Any) -> str | None:
    """Return the file of a function, seen through a decorator that sets `__wrapped__`; None if it has no code."""
    code = getattr(getattr(item, "__wrapped__", item), "__code__", None)
    return getattr(code, "co_filename", None)


def _compare_hashes(recorded: Recorded, of_model: Collection[Path]) -> CodeState | None:
    """Compare files by the hashes in the dump; return None if it has no hash of a file that is here.

    A file of the model without a recorded hash counts as changed: the training used another model.
    """
    hashes = recorded_hashes(recorded)
    # A recorder writes normalized names only; one file has endlessly many others.
    plain = [name for name in list(hashes)[:_MAX_FILES] if name == os.path.normpath(name).replace(os.sep, "/")]
    named = {name: path for name in plain if (path := own_source(name)) is not None}
    here = dict(_take_within(named, _MAX_HASHED_NBYTES))
    if not here:
        return None
    changes = [
        _change(name, changed_lines(hashes[name], path))
        for name, path in here.items()
        if is_changed(hashes[name], path)
    ]
    if recorded.sources and len(hashes) <= _MAX_FILES:
        unknown = sorted(set(of_model) - set(named.values()))
        changes += [CodeChange(file=shown_path(path), known_by="hash") for path in unknown]
    return CodeState(basis="hash", changes=tuple(changes), compared=tuple(here))


def _take_within(files: Mapping[str, Path], nbytes: int) -> Iterator[tuple[str, Path]]:
    """Yield the files in order, leaving out each that would bring their total size above `nbytes`."""
    for name, path in files.items():
        size = path.stat().st_size
        if size <= nbytes:
            nbytes -= size
            yield name, path


def recorded_hashes(recorded: Recorded) -> dict[str, SourceHash]:
    """Return the hashes by relative path; older recorders kept only those of the model's and the loss's file."""
    references = [reference for reference in (recorded.model, recorded.loss_function) if reference is not None]
    single = {item.file: SourceHash(sha256=item.sha256) for item in references if item.file and item.sha256}
    return {**single, **{name: source for name, source in recorded.sources.items() if source.sha256}}


def _change(file: str, lines: tuple[int, int] | None) -> CodeChange:
    """Build the record of a changed file; `lines` is its first changed line and the number of changed lines."""
    line, num_lines = lines or (None, None)
    return CodeChange(file=file, known_by="hash", line=line, num_lines=num_lines)


def _compare_times(dump: Path, files: Sequence[Path]) -> CodeState:
    try:
        written_ns = dump.stat().st_mtime_ns
    except OSError:
        return CodeState()
    newer = (path for path in files if path.stat().st_mtime_ns > written_ns)
    changes = tuple(CodeChange(file=shown_path(path), known_by="time") for path in newer)
    return CodeState(basis="time" if files else "none", changes=changes, compared=tuple(map(shown_path, files)))


def find_unchanged(code: CodeState, told: Mapping[Path, str | None]) -> SourcePatch | None:
    """Return the patch from the training's code to the code now; `told` has the earlier texts that the caller knows.

    The code's project must be open. Return None if nothing has changed, or if a file's earlier text is unknown or
    cannot be run.
    """
    files = []
    for change in code.changes:
        path = Path(change.file).resolve()
        before = told.get(path)
        try:
            after, _ = decode_source(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return None
        if before is None or not _can_be_undone(before, after):
            return None
        if before != after:
            # Use the path that the module was loaded from, which may be a symbolic link.
            names = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
            same = (name for name in names if name.endswith(path.name) and Path(name).resolve() == path)
            files.append(ChangedFile(path=next(same, str(path)), before=before, after=after))
    return SourcePatch(root=str(Path.cwd()), files=tuple(files)) if files else None


def _can_be_undone(before: str, after: str) -> bool:
    """Return True if two texts differ only in imports and in bodies of functions that run after the model is built."""
    try:
        skeletons = [ast.dump(_Skeleton().visit(ast.parse(text))) for text in (before, after)]
    except (SyntaxError, ValueError, RecursionError):
        return False
    return skeletons[0] == skeletons[1]


class _Skeleton(ast.NodeTransformer):
    """A transformer that drops imports and function bodies, except of functions that build a model."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name not in _BUILD:
            node.body = [ast.Pass()]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        return None

    visit_ImportFrom = visit_Import  # noqa: N815
