"""Replays one file in a worker, and returns the result and the reports as text.

torch is imported when the first job runs, and stays loaded for the next, with the user's modules.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nandoctor.errors import DumpError, NanDoctorError
from nandoctor.evidence.triage import CodePlace, DumpFinding, DumpResult, FileOutcome
from nandoctor.hidden_warnings import warnings_hidden
from nandoctor.machine import is_out_of_memory
from nandoctor.source_files import hash_of
from nandoctor.step.settings import Settings
from nandoctor.text import brief

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report

_MAX_REASON = 600
_RUN_NAMES = ("run", "run_id", "run_name", "experiment")  # under which most scripts name theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A file to replay; `path` is absolute, `shown` as the user named it, `cwd` the base of paths in SPECs and dumps.

    If fixes are looked for, its page is rendered as well. After `timeout_s` seconds the process ends itself; never if
    that is None.
    """

    path: Path
    shown: str
    key: str
    settings: Settings
    cwd: Path
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """The result of a job, and its report as JSON and as a page, each "" if there is none."""

    result: DumpResult
    report: str = ""
    page: str = ""


def run_job(job: Job) -> JobAnswer:
    """Replay the file; the answer tells of any failure that does not end the process."""
    started = time.perf_counter()
    try:
        with (
            _deadline(job.timeout_s) if job.timeout_s is not None else contextlib.nullcontext(),
            # A dump names files from the user's folder: a worker of a cluster may run elsewhere.
            contextlib.chdir(job.cwd) if job.cwd.is_dir() else contextlib.nullcontext(),
            contextlib.redirect_stdout(sys.stderr),
            warnings_hidden(),
        ):
            answer = _replay(job)
    except (Exception, SystemExit) as error:
        answer = JobAnswer(result=_describe_error(job, error))
    return replace(answer, result=replace(answer.result, elapsed_s=time.perf_counter() - started))


def _replay(job: Job) -> JobAnswer:
    from nandoctor.dumps.reader import read_dump
    from nandoctor.evidence.codec import to_json
    from nandoctor.pipeline import add_fixes, replay_dump
    from nandoctor.step.weights import take_weights
    from nandoctor.verification import tell_if_changed
    from nandoctor.views.html import page_of
    from nandoctor.views.report import report_document

    try:
        dump = read_dump(job.path)
    except DumpError as error:
        return JobAnswer(result=_describe_error(job, error, "unreadable"))
    dump = take_weights(dump, job.settings)
    found = replay_dump(dump, job.settings)
    if found.report.verdict == "not-reproduced":
        found = tell_if_changed(found, dump, job.settings)
    report = add_fixes(found, job.settings)
    scalars = dump.scalars_by_last_name
    runs = (str(scalars[name]) for name in _RUN_NAMES if isinstance(scalars.get(name), str | int))
    # The user's own files that the result depends on, so that a later run can tell whether it still holds.
    sources = list[tuple[str, str]]()
    for path in sorted(found.step.project.files(found.step.model)) if found.step is not None else ():
        with contextlib.suppress(OSError):
            sources.append((str(path), hash_of(path)))
    finding = DumpFinding(
        verdict=report.verdict,
        grade=report.reproduction.grade,
        headline=report.headline,
        cause=report.cause.code if report.cause is not None else None,
        title=report.cause.title if report.cause is not None else "",
        place=_describe_place(report),
        fix=next((fix.title for fix in report.fixes if fix.verified), ""),
    )
    result = DumpResult(
        path=job.shown,
        key=job.key,
        outcome="analysed",
        finding=finding,
        run=brief(next(runs, "")),
        step=dump.step,
        sources=tuple(sources),
    )
    page = page_of(report_document(report, "page")) if job.settings.fixes else ""
    return JobAnswer(result=result, report=to_json(report), page=page)


def _describe_place(report: Report) -> CodePlace:
    origin = report.origin
    if origin is None:
        first = report.first_nonfinite
        return CodePlace(module=first.place.module, type=first.place.type) if first is not None else CodePlace()
    place = CodePlace(module=origin.place.module, type=origin.place.type, op=origin.op or "")
    source = origin.source
    return place if source is None else replace(place, file=source.file, line=source.line, text=source.text)


def _describe_error(job: Job, error: BaseException, outcome: FileOutcome = "failed") -> DumpResult:
    told = f"{error.message.rstrip('.')}. {error.remedy}" if isinstance(error, NanDoctorError) else ""
    text = told.removeprefix(f"{job.path}: ") or f"{type(error).__name__}: {error}"  # others may have the same reason
    if is_out_of_memory(error):
        outcome, text = "out-of-memory", told or "There was not enough memory to replay it."
    return DumpResult(path=job.shown, key=job.key, outcome=outcome, reason=brief(" ".join(text.split()), _MAX_REASON))


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """End the process when time is up: C code cannot be interrupted in any other way."""
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
