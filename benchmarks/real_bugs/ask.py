"""Answers a question about one bug, in a process of its own: packages, tools and failing steps can end or spoil one.

In: a question (a tool's name, `steps`, `fixes`, `fixed` or `outcomes`), the bug, and the folders of packages; to a
fresh process as `python ask.py QUESTION TITLE ANSWERS FOLDER...`. Out: lines of JSON in the file ANSWERS, each as soon
as it is known: what comes before a crash is not lost.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from outcomes import outcome_or_error
from peers import Claim, Tool, ask_anomaly_mode, ask_nandoctor, ask_plain_hooks, ask_torchlens, ask_transformers
from sick_models import Case
from sick_models.judging import diagnose
from sick_models.probing import run

from real_bugs import geometry, pictures_and_sound, probability, sequences
from real_bugs.bug import Bug

BUGS: dict[str, Bug] = {
    bug.title: bug for module in (pictures_and_sound, sequences, probability, geometry) for bug in module.BUGS
}
TOOLS: dict[str, Tool] = {
    "nandoctor": ask_nandoctor,
    "plain hooks with isfinite": ask_plain_hooks,
    "transformers DebugUnderflowOverflow": ask_transformers,
    "torch.autograd.detect_anomaly": ask_anomaly_mode,
    "TorchLens find_nan": ask_torchlens,
}

LONGEST_S = 60
"""Processor time after which a process is ended: TorchLens does not come to the end of an integrated equation."""


def main() -> None:
    """Answer the question of the command line; what a fix needs to be told comes on standard input."""
    question, title, answers, *folders = sys.argv[1:]
    given = sys.stdin.read() if question == "fixed" else ""
    answer(question, BUGS[title], answers, folders, given=given)


def answer(question: str, bug: Bug, answers: str, folders: list[str], *, given: str = "") -> None:
    """Write the answers, line by line."""
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))
    warnings.simplefilter("ignore")
    sys.path[:0] = folders
    with Path(answers).open("a", encoding="utf-8") as file:
        for line in _answer(question, bug, given):
            print(json.dumps(line), file=file, flush=True)


def _answer(question: str, bug: Bug, given: str) -> Iterator[Any]:
    if question in TOOLS:
        yield from (asdict(claim_of(TOOLS[question], case)) for case in (bug.case(), bug.control()))
    elif question == "steps":
        yield from (ending_of(case) for case in (bug.case(), bug.control()))
    elif question == "fixes":
        yield diagnosis_of(bug.case())
    elif question == "outcomes":
        yield from (frozen(case, fixes=fixes) for case, fixes in ((bug.case(), True), (bug.control(), False)))
    else:
        yield ending_of(patched(bug.case(), json.loads(given)))


def claim_of(tool: Tool, case: Case) -> Claim:
    """What a tool says; that it crashed where it fails on the step itself."""
    torch.manual_seed(0)
    try:
        return tool(case)
    except Exception:  # of any package, and of any tool on it
        return Claim(crashed=True)


def ending_of(case: Case) -> str:
    """How the plain step under emulated autocast ends: what is first non-finite in it, what it raised, or ''."""
    torch.manual_seed(0)
    try:
        return run(case, autocast=True).first_nonfinite
    except (RuntimeError, AssertionError, IndexError) as error:  # torch's and the packages' own checks
        return f"raised {type(error).__name__}"


def diagnosis_of(case: Case) -> dict[str, Any]:
    """The verdict, the cause and the verified fixes of nandoctor."""
    with tempfile.TemporaryDirectory() as folder:
        report = diagnose(case, Path(folder), fixes=True)
    return {
        "verdict": report.verdict,
        "cause": report.cause.code if report.cause else None,
        "fixes": [asdict(fix) for fix in report.fixes if fix.verified],
    }


def frozen(case: Case, *, fixes: bool) -> dict[str, Any]:
    """What `outcomes.py` keeps of the diagnosis."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        return outcome_or_error(lambda: diagnose(case, folder, fixes=fixes), folder)


def patched(case: Case, fix: dict[str, Any]) -> Case:
    """The step with a printed snippet executed where it belongs; of a diff the code is already another."""
    if fix["kind"] == "data":
        return replace(case, batch=lambda: _executed(fix["patch"], "batch", case.batch))
    if fix["kind"] in ("snippet", "state"):
        return replace(case, build=lambda: _executed(fix["patch"], "model", case.build))
    return case


def _executed(patch: str, name: str, make: Callable[[], Any]) -> Any:
    made = make()
    exec(patch, {"torch": torch, name: made})
    return made


if __name__ == "__main__":
    main()
