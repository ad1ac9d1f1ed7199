"""Decides whether the step of a dump passes under the current code, and whether that can be decided at all.

`replay --check`, `verify`, `fix --write` and a project's tests all use this.

A step that passes has been fixed only if it is the step that failed, and something about it has changed. If the mode
or the random state of the failing step is unknown, if nothing has changed, or if what failed is not replayed, the
answer is that it cannot be told.

A recorder's dump has hashes of the training's source files. Any other dump has only its modification time: newer files
count as changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from nandoctor.changes.setting import SetLossScale
from nandoctor.diagnosis.verdict import describe_idle_state, doubt_output
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.engine.progress import Progress
from nandoctor.engine.runner import FailingStep
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.edits import Edit, Together
from nandoctor.evidence.report import WRONG, Report
from nandoctor.evidence.trace import describe_run
from nandoctor.evidence.verification import CodeChange, CodeState, Verification
from nandoctor.fixes.meaning import Meaning
from nandoctor.fixes.proof import Verifier
from nandoctor.fixes.verify import BudgetSpent, TrialBudget, Trials
from nandoctor.fixes.writing import WrittenChange
from nandoctor.pipeline import Diagnosed, replay_dump
from nandoctor.source_files import is_changed, is_installed, own_source
from nandoctor.step.settings import Settings
from nandoctor.text import are, join_first, mode_text, part_of, relative_path
from nandoctor.views.fixes import command_for
from nandoctor.views.verification import describe_changes

_PASSES = ("healthy", "not-reproduced")
_SAYS_WHAT_FAILED = {
    "loss": "the loss was non-finite",
    "gradients": "the gradients were non-finite",
    "skipped": "the gradients were non-finite at the loss scale, and the scaler skipped the step",
    "update": "the optimizer's update left non-finite weights",
}
_NEEDED = ("state_dict", "input", "batch", "the weights of the step")
"""Prefixes of the entries of `Dump.missing` that a replay cannot do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A request: the dump, how to replay it, and what the caller knows.

    `changed` are files that the caller says were changed, for a dump that cannot tell; or True. `proved`: a search has
    proved the change, in its very text, on the step in this mode and with these random numbers.
    """

    dump: Dump
    settings: Settings
    changed: Changed = ()
    proved: bool = False


def verify_dump(query: Query, *, progress: Progress) -> tuple[Verification, Report]:
    """Replay the step under the current code; return whether it has been fixed, and the report of the replay.

    Raises:
        NanDoctorError: the step cannot be replayed.
    """
    found = replay_dump(query.dump, query.settings, progress=progress)
    causes = [found.report.cause, *(diagnosis.cause for diagnosis in found.report.also)]
    # Nothing but buffers in the file is wrong, as after a failing forward in train mode.
    by_buffers = found.report.verdict == "state" and all(it and it.code == "poisoned-buffers" for it in causes)
    if by_buffers and _guessed_mode(query):
        trained = replay_dump(query.dump, replace(query.settings, mode="train"), progress=progress)
        # Non-finite statistics alone are no failure of a step in train mode, and no sound state either.
        is_told = _describe_failure(trained, query.dump) is not None
        found = trained if is_told and trained.report.verdict in _PASSES else found
    verification = _conclude(found, query)
    return verification, _add_outcome(found.report, verification)


def tell_if_changed(found: Diagnosed, dump: Dump, settings: Settings) -> Diagnosed:
    """Add to a replay that did not reproduce the failure what is known of changes to the code."""
    verification = _conclude(found, Query(dump=dump, settings=settings))
    return replace(found, report=_add_outcome(found.report, verification))


def _add_outcome(report: Report, verification: Verification) -> Report:
    """Return the report; its verdict becomes "fixed" if the dump's hashes show that the code has changed."""
    code = verification.code
    command = command_for("verify", report) or "nandoctor verify"
    if verification.outcome == "fixed" and code.basis == "hash":
        headline = f"Your code has changed since, and the step passes now: {describe_changes(code)}."
        return replace(report, verdict="fixed", headline=headline, next_steps=(f"Confirm: {command}",))
    if verification.outcome == "fixed":
        files = join_first([change.file for change in code.changes], 3)
        note = f"Written after the dump: {files}. If that was your fix, it works: {command}"
        return replace(report, notes=(*report.notes, note))
    return replace(report, notes=tuple(dict.fromkeys((*report.notes, *verification.reasons))))


def _guessed_mode(query: Query) -> bool:
    return query.settings.mode is None and not query.dump.recorded.training


def _conclude(found: Diagnosed, query: Query) -> Verification:
    report, step = found.report, found.step
    failure = _describe_failure(found, query.dump) or ("the replay of the code as it was" if query.proved else None)
    run = report.runs.autocast if report.runs is not None else None
    blank = Verification(
        dump=report.dump.path,
        outcome="cannot-tell",
        headline="",
        failure=failure,
        verdict=report.verdict,
        under=describe_run(run.policy, run.dtype) if run is not None else None,
    )
    if step is None:
        return _cannot_tell(blank, ["The file holds no batch, so there is no step to run."])
    blank = replace(blank, code=find_changes(query, step), run=mode_text(step.randomness.seed, step.mode.training))
    if report.verdict == "cannot-tell":
        return _cannot_tell(blank, [report.headline], report.next_steps)
    if report.verdict not in _PASSES and not (report.verdict == "loss-scale" and step.mode.is_first_scale):
        return _fails(blank, report, query)
    if _guessed_mode(query):  # it passes in both, and most likely failed in train mode
        step = replace(step, mode=replace(step.mode, training=True))
        modes = (attempt.training for attempt in report.reproduction.attempts)
        blank = replace(blank, run=mode_text(step.randomness.seed, *modes))
    measured = blank if query.proved else _measure(blank, step, query, found)
    notes = [*describe_idle_state("healthy", report.dump, step.built)]
    if step.loss is None:
        notes.append("The gradients of your loss were not checked: pass --loss.")
    if measured.code.changes and measured.output is not None:
        notes.append("The reference is the current code in fp32.")
    measured = replace(measured, notes=tuple(notes))
    if doubts := {} if query.proved else dict(_doubts(measured, found, query)):
        return _cannot_tell(measured, [*doubts], [*filter(None, doubts.values())])
    if failure is None:
        return replace(measured, outcome="passes", headline="the step passes, and the file does not say that it failed")
    return replace(measured, outcome="fixed", headline="the step that failed passes now")


def _fails(blank: Verification, report: Report, query: Query) -> Verification:
    """Return the answer for a replay that is still non-finite, or wrong."""
    shown = replace(blank, origin=report.origin, cause=report.cause, first_nonfinite=report.first_nonfinite)
    if report.origin is not None and report.origin.phase == "optimizer":
        reason = "The optimizer's settings and state are those in the file: a change of the training is not seen here."
        return _cannot_tell(shown, [reason])
    if query.dump.other_weights:
        shown = replace(shown, notes=query.dump.notes)  # these say whose weights they are
        if report.verdict == "state":
            reason = "The weights that were given are non-finite, and not known to be those of the failing step."
            return _cannot_tell(shown, [reason], ["Give a checkpoint from before the failing step with --weights."])
    explain = () if report.cause is None else (f"nandoctor explain {report.cause.code}",)
    return replace(shown, outcome="still-fails", headline=report.headline, next_steps=explain)


def _cannot_tell(blank: Verification, reasons: Sequence[str], next_steps: Sequence[str] = ()) -> Verification:
    headline = reasons[0][0].lower() + reasons[0][1:].rstrip(".")
    return replace(
        blank, outcome="cannot-tell", headline=headline, reasons=tuple(reasons), next_steps=tuple(next_steps)
    )


def _describe_failure(found: Diagnosed, dump: Dump) -> str | None:
    """Return what in the file shows that the step failed, or None if nothing does."""
    report = found.report
    reason = dict(report.dump.scalars).get("reason", "")
    if report.dump.layout == "nandoctor.dump/1" and reason in _SAYS_WHAT_FAILED:
        return _SAYS_WHAT_FAILED[reason]
    graded = report.reproduction
    if graded.num_bad_saved and graded.numel:
        values = part_of(graded.num_bad_saved, graded.numel, "value")
        return f"{values} of the saved {graded.output} {are(graded.num_bad_saved)} non-finite"
    flags = dump.saved_flags
    named = ["the saved loss is non-finite"] if flags.loss is not None else flags.numbers
    return join_first(named, 3) if found.step is not None and named else None


def _measure(blank: Verification, step: FailingStep, query: Query, found: Diagnosed) -> Verification:
    """Run the step with its gradients and its variations, and compare them with fp32.

    If memory runs out, nothing is known of the output.
    """
    is_lowered = query.dump.loss_scale not in (None, query.settings.loss_scale)
    lowered = query.settings.loss_scale if is_lowered else None
    edit: Edit = Together(edits=()) if lowered is None else SetLossScale(value=lowered)
    off_saved = found.report.reproduction.max_rel_err
    as_saved = off_saved is not None and off_saved <= WRONG
    try:
        trials = Trials(step, TrialBudget(), numerics=False, as_saved=as_saved)
        meaning = Meaning(trials=trials.with_gradients)
        verifier = Verifier(trials, guilty=(), random=found.random, trusts_fp32=True, meaning=meaning)
        judgement, checks = verifier.verify(WrittenChange(kind="source", title="", text="", change=None), edit)
        return replace(blank, output=judgement.outcome, checks=checks)
    except BudgetSpent:
        return blank


_OTHER_VALUES = (
    "If the change is meant to give other values, no dump can confirm it: compare them yourself. A test of it can ask "
    "for `output.finite` of the answer, in Python or with --json, in place of the exit code."
)


def _doubts(measured: Verification, found: Diagnosed, query: Query) -> Iterator[tuple[str, str]]:
    """Yield why a finite step is not the one that failed, or not right, each with what to do, "" if that is nothing."""
    code = measured.code
    if measured.output is None:
        yield "There is not enough memory to check the output and the gradients.", ""
    for check in (check for check in measured.checks if check.status == "failed"):
        yield f"The step is finite, but it does not pass the check of {check.name}: {check.text}.", ""
    for text in query.dump.missing if query.dump.is_recorded else ():
        if text.startswith(_NEEDED):
            yield f"The recorder could not keep {text}.", ""
    if query.dump.other_weights:
        yield "The weights are not known to be those of the failing step, which may still fail with its own.", ""
    if _draws_others(found, query):
        reason = "The step draws random numbers, and the state of the generator that it drew from is not here."
        yield reason, "Give the --seed with which the unchanged code fails."
    graded = found.report.reproduction
    if graded.grade == "no-reference" and graded.num_bad_saved:
        yield f"None of the outputs is known to be the saved {graded.output}: the step may be another than failed.", ""
    if not found.random:
        yield from ((gap.text, _OTHER_VALUES if code.changed else gap.remedy) for gap in doubt_output(graded))
    if measured.failure is None or code.changed:
        return
    files, name_it = join_first(list(code.compared), 3), "Name the file that you changed: --changed FILE"
    if code.basis == "hash":
        yield f"Nothing has changed since the dump was written ({files}), so this is not what failed.", ""
    elif code.basis == "time":
        yield f"No file of the model has changed since the dump was written ({files}), and the step passes.", name_it
    else:
        yield "The dump holds no hashes of the code, so there is no telling whether it has changed.", name_it


def _draws_others(found: Diagnosed, query: Query) -> bool:
    """Return True if the step draws random numbers, and the replay may draw others than the failing step did."""
    step, autocast = found.step, query.dump.recorded.autocast
    assert step is not None
    if not found.random or query.settings.seed is not None:
        return False
    elsewhere = autocast is not None and autocast.device != step.mode.device.type
    return elsewhere or step.randomness.seed is not None or not step.randomness.states


_MAX_FILES = 500

Changed = bool | Sequence[Path]
"""Files that the user says were changed; True for files that are not named."""


def find_changes(query: Query, step: FailingStep) -> CodeState:
    """Compare the step's code with the training's, and add what the user says about it.

    Raises:
        NanDoctorError: the user names a file that the step does not run.
    """
    dump, settings, changed = query.dump, query.settings, query.changed
    of_model = _files_of(step.model)
    helpers = {path.resolve() for path in step.project.files(step.model)}
    told = () if isinstance(changed, bool) else changed
    loaded = {str(vars(module).get("__file__")) for module in list(sys.modules.values())}
    if others := [path for path in told if str(path.resolve()) not in {*map(str, of_model | helpers), *loaded}]:
        files = join_first(sorted(map(relative_path, of_model | helpers)), 3)
        raise NanDoctorError(f"The step runs no file {others[0]}.", remedy=f"Name one that it runs: {files}.")
    by_user = tuple(CodeChange(file=relative_path(path.resolve()), known_by="user") for path in told)
    found = _compare_hashes(dump.recorded, of_model)
    if found is None:
        functions = (settings.call, settings.loss)  # they may have been written for the replay
        places = [item.rpartition(":")[0] if isinstance(item, str) else _file_of(item) for item in functions]
        helpers -= {(settings.directory / place).resolve() for place in places if place}
        found = _compare_times(dump.path, sorted(of_model | helpers)[:_MAX_FILES])
    changes = (*by_user, *(change for change in found.changes if change.file not in {one.file for one in by_user}))
    by_word = ("the code, as you say",) if changed is True else ()
    autocast, differing = dump.recorded.autocast, []
    trained = (autocast.dtype if autocast.enabled else "none") if autocast is not None else None
    if trained is not None and settings.amp_dtype not in (None, trained):
        differing.append(f"autocast in {settings.amp_dtype}, in the training in {trained}")
    return replace(found, changes=changes, settings=(*differing, *by_word))


def _files_of(model: nn.Module) -> set[Path]:
    """Return the project's own files that define the methods of the model's modules."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if base is not nn.Module}
    names = {_file_of(member) for kind in classes for member in vars(kind).values()} - {None}
    return {path.resolve() for path in map(Path, map(str, names)) if path.is_file() and not is_installed(path)}


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
        changes += [CodeChange(file=relative_path(path), known_by="hash") for path in unknown]
    return CodeState(basis="hash", changes=tuple(changes), compared=tuple(here))


def _compare_times(dump: Path, files: Sequence[Path]) -> CodeState:
    try:
        written_ns = dump.stat().st_mtime_ns
    except OSError:
        return CodeState()
    newer = (path for path in files if path.stat().st_mtime_ns > written_ns)
    changes = tuple(CodeChange(file=relative_path(path), known_by="time") for path in newer)
    return CodeState(basis="time" if files else "none", changes=changes, compared=tuple(map(relative_path, files)))
