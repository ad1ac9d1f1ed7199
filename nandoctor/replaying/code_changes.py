"""Tells what has changed in the code since a dump was written.

In: a dump, and the step as its replay runs it. Out: `CodeState`.

A recorder's dump has the hashes of the training's files. Of any other dump only its age is known: a file that is not
newer has not been written since, and one that is may still have the text that git had for it at the time, as after a
fresh clone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.evidence.verification import CodeChange, CodeState
from nandoctor.replaying.git_history import text_at
from nandoctor.replaying.runner import FailingStep
from nandoctor.replaying.settings import Settings
from nandoctor.source_files import (
    SourceHash,
    changed_lines,
    count_changes,
    hash_of,
    is_installed,
    own_source,
    shown_path,
)

_MAX_FILES = 500


def find_changes(dump: Dump, step: FailingStep, settings: Settings, *, told: Sequence[Path] = ()) -> CodeState:
    """Compare the code of the step with that of the training; `told` are files that the user says were changed."""
    of_model = _files_of(step.model)
    helpers = {path.resolve() for path in step.project.files(step.model)} - _named_by_user(settings)
    by_user = tuple(CodeChange(file=shown_path(path), known_by="user") for path in told)
    found = _compare_hashes(dump.recorded, of_model)
    found = found or _compare_times(dump.path, sorted(of_model | helpers)[:_MAX_FILES])
    changes = (*by_user, *(change for change in found.changes if change.file not in {one.file for one in by_user}))
    return CodeState(
        basis=found.basis,
        changes=changes,
        settings=tuple(_changed_settings(dump.recorded, settings)),
        compared=found.compared,
    )


def _files_of(model: nn.Module) -> set[Path]:
    """The project's own files that the classes of the model's modules come from."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if base is not nn.Module}
    names = {_file_of(member) for kind in classes for member in vars(kind).values()} - {None}
    return {path.resolve() for path in map(Path, map(str, names)) if path.is_file() and not is_installed(path)}


def _named_by_user(settings: Settings) -> set[Path]:
    """Files of functions that stand around the model in the replay: they may have been written for the replay."""
    specs = [item for item in (settings.call, settings.loss) if item is not None]
    places = [item.rpartition(":")[0] if isinstance(item, str) else _file_of(item) for item in specs]
    return {(settings.directory / place).resolve() for place in places if place}


def _file_of(item: Callable[..., Any] | Any) -> str | None:
    """The file of a function, through decorators that say what they wrap."""
    code = getattr(getattr(item, "__wrapped__", item), "__code__", None)
    return getattr(code, "co_filename", None)


def _compare_hashes(recorded: Recorded | None, of_model: Collection[Path]) -> CodeState | None:
    """By the hashes in the dump; None where it has none of a file that is here.

    A model that comes from a file which the training did not have is another one than the training's.
    """
    hashes = recorded_hashes(recorded)
    # A name that is not plain is no recorder's: there are endlessly many names of one file.
    plain = [name for name in list(hashes)[:_MAX_FILES] if name == os.path.normpath(name).replace(os.sep, "/")]
    here = {name: path for name in plain if (path := own_source(name)) is not None}
    if not here:
        return None
    changes = [
        _change(name, "hash", changed_lines(hashes[name], path))
        for name, path in here.items()
        if hash_of(path) != hashes[name].sha256
    ]
    if recorded is not None and recorded.sources:
        unknown = sorted(set(of_model) - set(here.values()))
        changes += [CodeChange(file=shown_path(path), known_by="hash") for path in unknown]
    return CodeState(basis="hash", changes=tuple(changes), compared=tuple(here))


def recorded_hashes(recorded: Recorded | None) -> dict[str, SourceHash]:
    """By relative path; an older recorder kept those of the model's and the loss's file alone."""
    if recorded is None:
        return {}
    references = [reference for reference in (recorded.model, recorded.loss_function) if reference is not None]
    single = {item.file: SourceHash(sha256=item.sha256) for item in references if item.file and item.sha256}
    return {**single, **{name: source for name, source in recorded.sources.items() if source.sha256}}


def _change(file: str, known_by: Literal["hash", "time"], lines: tuple[int, int] | None) -> CodeChange:
    """A changed file, with its first changed line and their number where `lines` has them."""
    line, num_lines = lines or (None, None)
    return CodeChange(file=file, known_by=known_by, line=line, num_lines=num_lines)


def _compare_times(dump: Path, files: Sequence[Path]) -> CodeState:
    """By when the dump and the files were written."""
    try:
        written_ns = dump.stat().st_mtime_ns
    except OSError:
        return CodeState()
    changes = tuple(_written_since(written_ns, files))
    return CodeState(basis="time" if files else "none", changes=changes, compared=tuple(map(shown_path, files)))


def _written_since(written_ns: int, files: Iterable[Path]) -> Iterator[CodeChange]:
    for path in files:
        if path.stat().st_mtime_ns <= written_ns:
            continue
        now, old = path.read_bytes(), text_at(path, written_ns, any_branch=True)
        if old == now:
            continue
        yield _change(shown_path(path), "time", None if old is None else count_changes(_lines(old), _lines(now)))


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "surrogateescape").splitlines()


def _changed_settings(recorded: Recorded | None, settings: Settings) -> Iterator[str]:
    """What the user asked of the replay that the training did not do, by the record of it."""
    autocast = recorded.autocast if recorded is not None else None
    if autocast is not None and settings.amp_dtype is not None and settings.amp_dtype != autocast.dtype:
        yield f"autocast in {settings.amp_dtype}, in the training in {autocast.dtype}"
