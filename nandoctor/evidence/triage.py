"""Records of a triage of many dumps: the result of each file, and the groups that they fall into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nandoctor.evidence.report import Grade, Verdict

SCHEMA = "nandoctor.triage/2"

FileOutcome = Literal["analysed", "unreadable", "failed", "out-of-memory", "died", "timed-out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePlace:
    """A place that many dumps may share: a line of code, or a module if the origin is not an operation of a line.

    `file` is "" and `line` 0 if no line is known. `module` is the module's dotted path and `type` its class.
    """

    file: str = ""
    line: int = 0
    text: str = ""
    module: str = ""
    type: str = ""
    op: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFinding:
    """The part of a report that dumps are grouped by, and the title of its first verified fix, "" without one."""

    verdict: Verdict
    grade: Grade
    headline: str
    cause: str | None
    title: str
    place: CodePlace
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpResult:
    """The result of one file. `reason` says why it was not analysed; `finding` is then None.

    `key` identifies the file, as it was, and the settings of its replay. `report` and `page` are the paths of the saved
    report relative to the triage folder, "" without one. `run` and `step` are those of the training; if the file names
    no run, its folder is one. `sources` are the user's files that the result depends on, each with its sha256.
    """

    kind: Literal["dump"] = "dump"
    path: str
    key: str
    outcome: FileOutcome
    reason: str = ""
    finding: DumpFinding | None = None
    run: str = ""
    step: int | None = None
    report: str = ""
    page: str = ""
    elapsed_s: float = 0.0
    sources: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(DumpFinding):
    """Dumps with one cause at one place in the code; the finding is that of the `representative`.

    `paths` are the files in the order of their steps, `modules` the dotted paths that the origin was found in. `steps`
    are the first and the last. `fix` was verified on `representative`, the dump that `page` reports on, and `command`
    shows it; `fix_note` says why there is none.
    """

    kind: Literal["group"] = "group"
    paths: tuple[str, ...]
    modules: tuple[str, ...]
    steps: tuple[int, int] | None
    runs: tuple[str, ...]
    representative: str
    fix_note: str = ""
    command: str = ""
    page: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """The whole triage. `num_reused` results come from an earlier run; `num_left` files were not analysed."""

    schema: str = SCHEMA
    dumps: tuple[DumpResult, ...]
    groups: tuple[Group, ...]
    num_reused: int
    num_left: int
    elapsed_s: float
    folder: str

    def __repr__(self) -> str:
        num_failed = sum(dump.finding is None for dump in self.dumps)
        failed = f", {num_failed} not analysed" if num_failed else ""
        return f"Triage({len(self.dumps)} dumps, {len(self.groups)} groups{failed}; the page is in {self.folder})"
