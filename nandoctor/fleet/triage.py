"""Replays many dumps in long-lived workers, groups the causes, and tries fixes on one dump of each group.

The folder of a triage has one result for each file and settings, so that it can be stopped and resumed. Every file in
it is written whole or not at all.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from nandoctor import __version__
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.codec import from_plain, to_json, to_plain
from nandoctor.evidence.report import NOTHING_FOUND
from nandoctor.evidence.triage import DumpFinding, DumpResult, Group, Triage
from nandoctor.fleet.pool import Workers, open_workers
from nandoctor.fleet.worker import Job, JobAnswer
from nandoctor.source_files import hash_of, read_regular
from nandoctor.step.settings import Settings, settings_for
from nandoctor.text import brief
from nandoctor.views.fixes import command_arguments
from nandoctor.views.html import page_of
from nandoctor.views.save import is_replaceable, write_text
from nandoctor.views.triage import triage_document, triage_lines

DUMP_ENDINGS = (".pth", ".pt")

_Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

TriageProgress = Callable[[str, int, int], None]
"""Called with what is being done, how many files are done, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriageOptions:
    """How `triage` replays the files, and where it writes.

    Args:
        folder: where the page, the reports and the results go; results of an earlier run in it are reused.
        settings: `model` and keywords of `replay`, which override those of each file's project. SPECs and paths only:
            the files are replayed in other processes.
        executor: what runs the jobs in place of processes: any executor of `concurrent.futures`.
        scheduler: address of a Dask cluster to use in place of processes.
        jobs: number of processes; None to choose it by cores and memory.
        timeout_s: seconds that a file may take; None for no limit.
    """

    folder: str | os.PathLike[str] = "nandoctor-triage"
    settings: Mapping[str, Any] = field(default_factory=dict)
    executor: Executor | None = None
    scheduler: str | None = None
    jobs: int | None = None
    timeout_s: float | None = 1800.0


class InterruptedTriageError(NanDoctorError):
    """Ctrl-C was pressed; `triage` has what was done until then."""

    exit_code = 130

    def __init__(self, triage: Triage) -> None:
        super().__init__("interrupted.", remedy="Run the same command again to go on: finished files are not redone.")
        self.triage = triage


def find_dumps(patterns: _Patterns) -> list[Path]:
    """Return the files that folders (searched for .pth and .pt), glob patterns and names match, each once, in order.

    Raises:
        NanDoctorError: one of them matches nothing.
    """
    found: dict[str, Path] = {}
    for given in [patterns] if isinstance(patterns, str | os.PathLike) else patterns:
        pattern = os.fspath(given)
        named = [Path(pattern)]
        if not named[0].exists():  # an existing name may have brackets
            named = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207  (or absolute)
        files = list[Path]()
        for path in named:
            inside = (it for it in path.rglob("*") if it.suffix in DUMP_ENDINGS and not it.is_dir())
            files += sorted(inside) if path.is_dir() else [path]
        if not files:
            raise NanDoctorError(f"{pattern}: no dumps found there.", remedy="Name files, folders or patterns.")
        for file in files:
            real = os.path.realpath(file)
            if real not in found or (found[real].is_symlink() and not file.is_symlink()):
                found[real] = file
    return list(found.values())


def triage(
    patterns: _Patterns, options: TriageOptions | None = None, *, progress: TriageProgress = lambda *_: None
) -> Triage:
    """Replay many dumps, group them by cause and place, try fixes on one of each group, and write a page.

    A file that cannot be read, does not fit or ends its worker is one line of the result; the others go on. The work of
    an earlier run in the same folder is not repeated. In a script, call it under
    `if __name__ == "__main__":`, since the workers import the script.

    Args:
        patterns: files, folders (searched for .pth and .pt) and glob patterns, or one of them.
        options: how the files are replayed, and where the results go.
        progress: called with (what is being done, files done, files in all).

    Returns:
        `groups` (`paths`, `cause`, `place`, `fixes`, ... of each), and `dumps` (the result of each file).

    Raises:
        NanDoctorError: there are no files, no folder to work in or no cluster, or a setting is wrong.
        InterruptedTriageError: after Ctrl-C, with what was done.
    """
    options = options or TriageOptions()
    run = _TriageRun(options, find_dumps(patterns), progress)
    if options.jobs is not None and options.jobs < 1:
        raise NanDoctorError("There must be at least one worker.", remedy="Give --jobs 1 or more.")
    run.store.open()
    try:
        with open_workers(executor=options.executor, jobs=options.jobs, scheduler=options.scheduler) as workers:
            run.collect(workers, run.paths)
            run.collect(workers, run.representatives(), fixes=True)
    except KeyboardInterrupt:
        raise InterruptedTriageError(run.finish()) from None
    return run.finish()


class _TriageRun:
    def __init__(self, options: TriageOptions, paths: Sequence[Path], progress: TriageProgress) -> None:
        self.options = options
        self.paths = paths
        self.progress = progress
        self.store = Store(Path(options.folder))
        self.results: dict[str, DumpResult] = {}
        self.with_fixes: dict[str, DumpResult] = {}
        self.num_reused = 0
        self._started = time.perf_counter()

    def collect(self, workers: Workers, paths: Sequence[Path], *, fixes: bool = False) -> None:
        """Add the result of each file: first those in the folder, then the others as they come from workers."""
        results = self.with_fixes if fixes else self.results
        made = [self._make_job(path, fixes=fixes) for path in paths]
        known = (job for job in made if isinstance(job, DumpResult))
        with closing(workers([job for job in made if isinstance(job, Job)])) as answers:
            for number, result in enumerate(chain(known, map(self.store.keep, answers)), 1):
                results[result.path] = replace(result, run=result.run or brief(str(Path(result.path).parent)))
                self.progress("Fixes" if fixes else "Diagnosing", number, len(paths))

    def representatives(self) -> list[Path]:
        """Return the files to search for fixes on: one of each group that failed, none if no fixes are wanted."""
        if self.options.settings.get("fixes") is False:
            return []
        groups = group_results(self.results.values())
        return [Path(group.representative) for group in groups if group.verdict not in NOTHING_FOUND]

    def finish(self) -> Triage:
        """Return what is known, and write it into the files of the folder."""
        results = sorted(self.results.values(), key=lambda result: result.path)
        found = Triage(
            dumps=tuple(results),
            groups=tuple(self._with_fixes(group) for group in group_results(results)),
            num_reused=self.num_reused,
            num_left=len(self.paths) - len(results),
            elapsed_s=time.perf_counter() - self._started,
            folder=str(self.store.folder),
        )
        write_text(triage_lines(found), self.store.folder / _LINES)
        write_text(page_of(triage_document(found, "page")), self.store.folder / _PAGE)
        return found

    def _with_fixes(self, group: Group) -> Group:
        result = self.with_fixes.get(group.representative)
        if result is None:
            return group
        if result.finding is None:
            return replace(group, fix_note=f"The search for fixes ended early ({result.outcome}): {result.reason}")
        group = replace(group, fix=result.finding.fix, page=result.page)
        if not group.fix:
            return replace(group, fix_note=f"no fix was verified on {group.representative}")
        arguments = command_arguments(Path(group.representative), self.options.settings)
        return replace(group, command=shlex.join(["nandoctor", "fix", *arguments]) if arguments else "")

    def _make_job(self, path: Path, *, fixes: bool) -> Job | DumpResult:
        """Return the job of a worker for this file, or the result if that is known."""
        shown = str(path)
        try:
            settings = replace(settings_for(path, self.options.settings), fixes=fixes)
            key = self.store.key_of(path, settings)
        except OSError as error:
            reason = f"The file cannot be read: {error.strerror or error}."
            return DumpResult(path=shown, key="", outcome="unreadable", reason=reason)
        known = self.store.find(key)
        if known is not None:
            self.num_reused += not fixes
            return replace(known, path=shown)
        return Job(
            path=path.resolve(),
            shown=shown,
            key=key,
            settings=settings,
            cwd=Path.cwd(),
            timeout_s=self.options.timeout_s,
        )


# The replay that agrees best with what was saved represents its group; the best grade comes first.
_GRADES = ("exact", "same-mask", "no-reference", "elsewhere", "finite")

_Key = tuple[object, ...]


def group_results(results: Iterable[DumpResult]) -> tuple[Group, ...]:
    """Group the dumps that were analysed: failures first, then the largest groups."""
    members: dict[_Key, list[DumpResult]] = {}
    for result in sorted(results, key=lambda it: (it.run, -1 if it.step is None else it.step, it.path)):
        if result.finding is not None:
            members.setdefault(_key(result.finding), []).append(result)
    return tuple(sorted(map(_make_group, members.values()), key=_rank))


def _key(finding: DumpFinding) -> _Key:
    """Return what a group shares: verdict, cause and line; without a line, the module's class and path (blocks.*)."""
    place = finding.place
    if finding.verdict in NOTHING_FOUND:
        return (finding.verdict,)
    repeated = ".".join("*" if part.isdigit() else part for part in place.module.split("."))
    where = (place.file, place.line) if place.file else (place.type, repeated)
    return finding.verdict, finding.cause, *where


def _make_group(results: Sequence[DumpResult]) -> Group:
    found = [(result, result.finding) for result in results if result.finding is not None]
    findings = [finding for _, finding in found]
    # The choice is the same wherever and however often the dumps are replayed.
    representative, best = min(found, key=lambda pair: _GRADES.index(pair[1].grade))
    steps = [result.step for result in results if result.step is not None]
    return Group(
        **{item.name: getattr(best, item.name) for item in fields(best)},
        paths=tuple(result.path for result in results),
        modules=tuple(dict.fromkeys(finding.place.module for finding in findings)),
        steps=(min(steps), max(steps)) if steps else None,
        runs=tuple(sorted({result.run for result in results})),
        representative=representative.path,
    )


def _rank(group: Group) -> tuple[bool, int, str, str]:
    place = group.place
    return group.verdict in NOTHING_FOUND, -len(group.paths), group.cause or "", f"{place.file}:{place.line:09}"


_PAGE = "index.html"
_LINES = "triage.jsonl"
_RESULTS, _REPORTS = "results", "reports"
_KEY_DIGITS = 32


class Store:
    """The results of earlier runs, and a place for new ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        """Create the folder, or reuse one that a triage created.

        Raises:
            NanDoctorError: it holds other files, or it cannot be created.
        """
        written = [self.folder / name for name in (_PAGE, _LINES)]
        is_plain = all((it.is_file() or it.is_dir()) and not it.is_symlink() for it in self.folder.rglob("*"))
        known = is_plain and (self.folder / _RESULTS).is_dir() and all(map(is_replaceable, written))
        if self.folder.is_dir() and any(self.folder.iterdir()) and not known:
            raise NanDoctorError(
                f"{self.folder} holds files that nandoctor triage did not write.", remedy="Name another folder with -o."
            )
        try:
            for name in (_RESULTS, _REPORTS):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NanDoctorError(
                f"The folder {self.folder} cannot be created: {error.strerror or error}.",
                remedy="Name another one with -o.",
            ) from error

    def key_of(self, path: Path, settings: Settings) -> str:
        """Return the key of the result for this file, as it is now, under these settings.

        The file is told by its path, size and time: no limit applies here, so nothing of it is read.

        Raises:
            OSError: it cannot be read, or is a device or a pipe.
        """
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
        file = [os.path.realpath(path), status.st_size, status.st_mtime_ns]
        parts = json.dumps([__version__, file, to_plain(settings)], sort_keys=True, default=str)
        return hashlib.sha256(parts.encode()).hexdigest()[:_KEY_DIGITS]

    def find(self, key: str) -> DumpResult | None:
        """Return the result of an earlier run; None if there is none, or the code that it came from has changed.

        What was not analysed is tried again: most failures come from the code or the environment.
        """
        try:
            result = from_plain(DumpResult, json.loads(read_regular(self.folder / _RESULTS / f"{key}.json")))
            is_current = all(hash_of(Path(path)) == sha256 for path, sha256 in result.sources)
        except (OSError, ValueError, RecursionError):
            return None
        is_own = {result.report, result.page} <= {"", f"{_REPORTS}/{key}.json", f"{_REPORTS}/{key}.html"}
        return result if result.outcome == "analysed" and is_current and is_own else None

    def keep(self, answer: JobAnswer) -> DumpResult:
        """Write a worker's answer; the result comes last, so that the files that it names are there."""
        result, name = answer.result, f"{_REPORTS}/{answer.result.key}"
        if answer.report:
            write_text(answer.report + "\n", self.folder / f"{name}.json")
            result = replace(result, report=f"{name}.json")
        if answer.page:
            write_text(answer.page, self.folder / f"{name}.html")
            result = replace(result, page=f"{name}.html")
        write_text(to_json(result) + "\n", self.folder / _RESULTS / f"{result.key}.json")
        return result
