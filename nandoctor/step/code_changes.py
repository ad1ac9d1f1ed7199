"""Find what changed in the code since a dump was written.

A recorder's dump has hashes of the training's source files. Any other dump has only its modification time: newer files
count as changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.engine.runner import FailingStep
from nandoctor.evidence.verification import CodeChange, CodeState
from nandoctor.source_files import is_changed, is_installed, own_source, shown_path
from nandoctor.step.settings import Settings

_MAX_FILES = 500


Changed = bool | Sequence[Path]
"""Files that the user says were changed; True for files that are not named."""


def find_changes(dump: Dump, step: FailingStep, settings: Settings, *, changed: Changed = ()) -> CodeState:
    """Compare the step's code with the training's, and add what the user says about it."""
    of_model = _files_of(step.model)
    helpers = {path.resolve() for path in step.project.files(step.model)} - _named_by_user(settings)
    told = () if isinstance(changed, bool) else changed
    by_user = tuple(CodeChange(file=shown_path(path), known_by="user") for path in told)
    found = _compare_hashes(dump.recorded, of_model)
    found = found or _compare_times(dump.path, sorted(of_model | helpers)[:_MAX_FILES])
    changes = (*by_user, *(change for change in found.changes if change.file not in {one.file for one in by_user}))
    by_word = ("the code, as you say",) if changed is True else ()
    autocast, differing = dump.recorded.autocast, []
    if autocast is not None and settings.amp_dtype not in (None, autocast.dtype):
        differing.append(f"autocast in {settings.amp_dtype}, in the training in {autocast.dtype}")
    return replace(found, changes=changes, settings=(*differing, *by_word))


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
    hashes = {name: source for name, source in recorded.sources.items() if source.sha256}
    # A recorder writes normalized names only; one file has endlessly many others.
    plain = [name for name in list(hashes)[:_MAX_FILES] if name == os.path.normpath(name).replace(os.sep, "/")]
    here = {name: path for name in plain if (path := own_source(name)) is not None}
    if not here:
        return None
    changes = [CodeChange(file=name, known_by="hash") for name, path in here.items() if is_changed(hashes[name], path)]
    if len(hashes) <= _MAX_FILES:
        unknown = sorted(set(of_model) - set(here.values()))
        changes += [CodeChange(file=shown_path(path), known_by="hash") for path in unknown]
    return CodeState(basis="hash", changes=tuple(changes), compared=tuple(here))


def _compare_times(dump: Path, files: Sequence[Path]) -> CodeState:
    try:
        written_ns = dump.stat().st_mtime_ns
    except OSError:
        return CodeState()
    newer = (path for path in files if path.stat().st_mtime_ns > written_ns)
    changes = tuple(CodeChange(file=shown_path(path), known_by="time") for path in newer)
    return CodeState(basis="time" if files else "none", changes=changes, compared=tuple(map(shown_path, files)))
