"""Measure how often the diagnosis is right on the sick models, their variants, and the healthy models.

`python benchmarks/diagnosis.py` prints a table of every case and a summary; exit code 1 if anything is wrong.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from sick_models import Case, all_cases, decoyed, healthy_models, renamed
from sick_models.judging import diagnose, faults

from nandoctor.evidence.report import Report

ROW = "{:<24} {:<32} {:<36} {:<24} {:<5} {:<5} {:<6} {:<6}"


def main() -> int:
    """Print the table and the summary."""
    warnings.simplefilter("ignore")
    started, tally, wrong = time.perf_counter(), Counter[str](), list[str]()

    def examine(kind: str, case: Case) -> tuple[Report, str]:
        with tempfile.TemporaryDirectory() as folder:
            report = diagnose(case, Path(folder))
        found = faults(case, report)
        tally.update([kind] if found else [kind, f"{kind} right"])
        wrong.extend(f"{case.name}: {fault}" for fault in found)
        return report, "NO" if found else "yes"

    print(ROW.format("mechanism", "case", "origin", "cause", "right", "twin", "renam.", "decoy"))
    for case in all_cases():
        report, right = examine("sick", case)
        variants = {"healthy twin": case.twin(), "renamed": renamed(case), "decoyed": decoyed(case)}
        others = [examine(kind, variant)[1] for kind, variant in variants.items()]
        cause = report.cause.code if report.cause else "-"
        print(ROW.format(case.mechanism, case.name, _origin(report), cause, right, *others), flush=True)
    for case in _innocents():
        examine("healthy that looks ill", case)
    print()
    for kind in ("sick", "renamed", "decoyed", "healthy twin", "healthy that looks ill"):
        print(f"{kind:<24} {tally[f'{kind} right']} of {tally[kind]} right")
    print(f"{'time':<24} {time.perf_counter() - started:.0f} s")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def _innocents() -> Iterable[Case]:
    return (*healthy_models(), *(decoyed(case.twin()) for case in all_cases()))


def _origin(report: Report) -> str:
    if report.origin is None:
        return "-"
    return f"{report.origin.place.module or '(root)'} {report.origin.op or report.origin.phase}"


if __name__ == "__main__":
    sys.exit(main())
