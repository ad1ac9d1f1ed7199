"""Bugs of released packages, each cited, at a version that has them: what nandoctor and other tools say of each.

In: `python benchmarks/real_bugs [--cache FOLDER] [--only TEXT]`; pip fetches the packages into that folder.
Out: for each bug nandoctor's cause and first fix, which was applied in a copy and run; what each tool says of the bug
and of its healthy control; and the table of all.

Where the step of a bug does not fail, or that of a control does, the benchmark stops: the labels would be wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixes import copy_code
from peers import Claim, names_module, names_op

from real_bugs.ask import BUGS, TOOLS, answer
from real_bugs.bug import Bug, install

HERE = Path(__file__).resolve().parent
TORCHLENS = ("torchlens==2.36.1", "graphviz==0.20.3")
FORK = multiprocessing.get_context("fork")
REFUSES_FORKS = "TorchLens find_nan"
LONGEST_S = 1800.0
"""By the clock, for what waits for ever; `ask` bounds the processor time. What ends so or by a crash has no answer."""
ROW = "{:<38}" + "{:>8}" * 3 + "{:>10}{:>9}{:>9}{:>17}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was said of one bug: by nandoctor with fixes, and by each tool of the bug and of its control."""

    title: str
    diagnosis: dict[str, Any] | None
    after_fix: str
    claims: dict[str, tuple[Claim, Claim]]

    @property
    def bug(self) -> Bug:
        """The bug of this title."""
        return BUGS[self.title]


def main() -> None:
    """Ask about the bugs, as many at once as there are cores, and print each in turn, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "nandoctor-real-bugs")
    parser.add_argument("--only", default="", help="bugs whose title contains this")
    options = parser.parse_args()
    torchlens = install(TORCHLENS, options.cache)
    chosen = [bug for title, bug in BUGS.items() if options.only in title]
    folders = {bug.title: [*install(bug.packages, options.cache), *torchlens] for bug in chosen}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=FORK) as pool:
        found = []
        for findings in pool.map(ask, folders, folders.values()):
            found.append(findings)
            print("\n".join(describe(findings)), flush=True)
    print("\n".join(table(found)))


def ask(title: str, folders: list[Path]) -> Findings:
    """Make sure that the step fails and its control does not, then put every question, each in a process of its own."""
    bug = BUGS[title]
    sick, control = _ask("steps", bug, folders)
    assert sick, f"{bug.title}: the step does not fail"
    assert not control, f"{bug.title}: the control fails: {control}"
    diagnosis = next(iter(_ask("fixes", bug, folders)), None)
    return Findings(
        title=title,
        diagnosis=diagnosis,
        after_fix=try_fix(bug, diagnosis["fixes"][0], folders) if diagnosis and diagnosis["fixes"] else "",
        claims={tool: _claims((_ask_afresh if tool == REFUSES_FORKS else _ask)(tool, bug, folders)) for tool in TOOLS},
    )


def _ask(question: str, bug: Bug, folders: list[Path]) -> list[Any]:
    """The answers of a fork of this process, which has imported torch, and of the packages nothing."""
    with _answers() as (file, answers):
        child = FORK.Process(target=_answer_silently, args=(question, bug, str(file), list(map(str, folders))))
        child.start()
        child.join(LONGEST_S)
        child.kill()
        child.join()
        return answers()


def _ask_afresh(question: str, bug: Bug, folders: list[Path], *, code: Path = HERE, given: str = "") -> list[Any]:
    """The answers of a process that begins with nothing, and takes the steps from `code`."""
    with _answers() as (file, answers):
        command = [sys.executable, str(code / "ask.py"), question, bug.title, str(file), *map(str, folders)]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command, env=environment, input=given, text=True, capture_output=True, timeout=LONGEST_S, check=False
            )
        return answers()


def _answer_silently(question: str, bug: Bug, answers: str, folders: list[str]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    answer(question, bug, answers, folders)


@contextlib.contextmanager
def _answers() -> Iterator[tuple[Path, Callable[[], list[Any]]]]:
    """A file to answer in, and what is in it: all that came before the process ended, by itself or by a crash."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answers")
        file.touch()
        yield file, lambda: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _claims(answers: list[Any]) -> tuple[Claim, Claim]:
    claims = [Claim(**answer) for answer in answers] + 2 * [Claim(crashed=True)]
    return claims[0], claims[1]


def try_fix(bug: Bug, fix: dict[str, Any], folders: list[Path]) -> str:
    """Apply a fix as it is printed and run the step in a fresh process that knows nothing of the search."""
    if fix["kind"] == "setting":
        return "a setting, not run"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_code(copy)
        if fix["kind"] == "source":
            folders = apply(fix, folders, copy)
        code = copy / "benchmarks" / "real_bugs"
        endings = _ask_afresh("fixed", bug, folders, code=code, given=json.dumps(fix))
    return "no answer" if not endings else endings[0] or "all finite"


def apply(fix: dict[str, Any], folders: list[Path], copy: Path) -> list[Path]:
    """`git apply -p1` in a copy of the package that the diff is of, or of this repository; where packages are now.

    Raises:
        CalledProcessError: git refused the diff.
    """
    root = Path(fix["patch_root"])
    package = next((folder for folder in folders if root.is_relative_to(folder)), None)
    if package is None:
        place = copy / root.relative_to(HERE.parents[1])
    else:
        target = copy / "package"
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
        folders = [target if folder == package else folder for folder in folders]
        place = target / root.relative_to(package)
    subprocess.run(["git", "apply", "-p1", "-"], cwd=place, input=fix["patch"], text=True, check=True)
    return folders


def describe(findings: Findings) -> list[str]:
    """Where the bug was reported, what nandoctor says beside the label, and who was right of what."""
    bug = findings.bug
    lines = [bug.title, f"  {bug.packages[0]}; {bug.url}", f"  label: {bug.cause} ({bug.reason})"]
    if findings.diagnosis is None:
        lines.append("  nandoctor: crashed")
    else:
        verdict, cause, fixes = (findings.diagnosis[key] for key in ("verdict", "cause", "fixes"))
        lines.append(f"  nandoctor: {verdict}, {cause}: {'right' if named_cause(findings) else 'WRONG'}")
        fix = f"{fixes[0]['title']} ({fixes[0]['kind']}); applied: {findings.after_fix}" if fixes else "none verified"
        lines.append(f"  fix: {fix}")
    for tool, (claim, control) in findings.claims.items():
        right = ", ".join(what for what, is_right in points(bug, claim).items() if is_right) or "nothing right"
        said = "crashed" if claim.crashed else right if claim.alarm else "no alarm"
        lines.append(f"    {tool:<38} {said:<22} control: {of_control(control)}")
    return lines


def of_control(claim: Claim) -> str:
    """What a tool says where there is nothing to say."""
    return "crashed" if claim.crashed else "FALSE ALARM" if claim.alarm else "silent"


def points(bug: Bug, claim: Claim) -> dict[str, bool]:
    """Which of module, op and line are right."""
    case = bug.case()
    module = names_module(case, claim)
    line = claim.alarm and case.line in claim.line if case.line else module
    return {"module": module, "op": names_op(case, claim), "line": line}


def named_cause(findings: Findings) -> bool:
    """Tell whether nandoctor named the labelled cause and verdict."""
    bug, said = findings.bug, findings.diagnosis
    return said is not None and said["verdict"] == bug.verdict and said["cause"] == bug.cause


def table(found: list[Findings]) -> list[str]:
    """For each tool on how many bugs it was right, silent or crashed, and what it said of the controls."""
    titles = ("module", "op", "line", "no alarm", "crashed", "alarms", "crashed on")
    lines = ["", f"{len(found)} bugs, {len(found)} healthy controls", ROW.format("", *titles)]
    for tool in TOOLS:
        claims = [(findings.bug, *findings.claims[tool]) for findings in found]
        right = [points(bug, claim) for bug, claim, _ in claims]
        lines.append(
            ROW.format(
                tool,
                *(sum(point[what] for point in right) for what in ("module", "op", "line")),
                sum(not claim.alarm and not claim.crashed for _, claim, _ in claims),
                sum(claim.crashed for _, claim, _ in claims),
                sum(control.alarm for *_, control in claims),
                f"{sum(control.crashed for *_, control in claims)} controls",
            )
        )
    fixed = [findings.after_fix for findings in found if findings.after_fix]
    lines.append(f"nandoctor's cause and verdict: {sum(map(named_cause, found))} of {len(found)} right")
    lines.append(f"verified fixes: {len(fixed)}; as printed all finite in a fresh process: {fixed.count('all finite')}")
    return lines


if __name__ == "__main__":
    main()
