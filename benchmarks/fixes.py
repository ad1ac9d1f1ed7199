"""Apply every verified fix as it is printed, and run the step with it in a fresh, independent process.

`python benchmarks/fixes.py [--only TEXT] [--first N]` prints a row for each fix, and how many were applied, fixed the
failing batch and five others, left non-finite gradients, or changed healthy samples. A case is `right` if all of its
verified fixes are: finite, and as the unchanged step in fp32 or float64, or as its neighbours where that has no number.
It is `wrong` if one of them is not; a case without any has a `workaround` or `none`.

With `--real-bugs FOLDER` the bugs of released packages are judged instead, which pip fetches into that folder: how many
are right of those for which upstream merged something, and of those in which that keeps what the formula means.

A fix is applied with `git apply -p1` to a copy of the code, or executed. The process that judges it imports the step
and `nandoctor.cuda_autocast`, but nothing of the search or its checks (`fix_judge.py`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fix_cases import BUGS, CASES, ROOT, case_named
from real_bugs.bug import install
from sick_models.judging import diagnose

import nandoctor
from nandoctor.evidence.report import Fix, Report

ROW = "{:<34} {:>2} {:<8} {:<58} {:<9} {:<28} {}"
LARGEST_GRADIENT_ERROR = 0.1
HARMS = "healthy samples changed by more than 1 %"
NONFINITE = "non-finite gradients"
MADE_UP = "a number that the formula does not tend to"
OFF = "gradients more than 10 % off fp32 and fp64"


def main() -> None:
    """Print a row for each fix of each case, then the totals."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--first", type=int, default=None, help="judge at most this many fixes of each case")
    parser.add_argument("--real-bugs", type=Path, default=None, help="judge these, with the packages in this folder")
    parser.add_argument("--judge", default=sys.executable, help="the Python that judges: one with another torch, say")
    options = parser.parse_args()
    judge = _Judge(options.judge)
    tally, given = Counter[str](), dict[str, str]()
    print(ROW.format("case", "", "kind", "fix", "applied", "fails on", "gradients, harm"))
    for name in (name for name in (BUGS if options.real_bugs else CASES) if options.only in name):
        packages = install(BUGS[name].packages, options.real_bugs) if options.real_bugs else []
        with tempfile.TemporaryDirectory() as folder:
            report = _replay(name, Path(folder), packages)
            verdicts = []
            for fix in [fix for fix in report.fixes if fix.verified][: options.first]:
                verdict = judge.judge(name, fix, report, Path(folder), packages)
                verdicts.append((fix, verdict))
                tally.update(_count(verdict))
                print(_row(name, fix, verdict), flush=True)
            given[name] = _of_case(report, verdicts)
            if not verdicts:
                print(ROW.format(name, "", "-", f"no verified fix ({given[name]})", "", "", ""), flush=True)
            tally.update({"cases": 1, f"cases: {given[name]}": 1})
    print()
    for what, number in tally.items():
        print(f"{what:<44} {number:>5}")
    if options.real_bugs:
        print("\n".join(_shares(given)))


def _of_case(report: Report, verdicts: list[tuple[Fix, dict[str, Any]]]) -> str:
    """Return what all verified fixes of a case are together."""
    if not all(_is_right(verdict) for _, verdict in verdicts):
        return "wrong"
    if verdicts:
        return "right"
    return "workaround" if any(fix.workaround for fix in report.fixes) else "none"


def _shares(given: dict[str, str]) -> Iterator[str]:
    """Yield how many bugs are right of those that upstream fixed."""
    fixed = [name for name in given if BUGS[name].upstream]
    keeping = [name for name in fixed if not BUGS[name].upstream_replaces]
    for names, what in ((fixed, "fixed upstream"), (keeping, "fixed upstream, and what the formula means is kept")):
        if names:
            right = sum(given[name] == "right" for name in names)
            yield f"{what}: {right} of {len(names)} right ({100 * right / len(names):.0f} %)"


def _replay(name: str, folder: Path, packages: list[Path]) -> Report:
    if name.startswith("sample/"):
        dump = ROOT / "sample_dumps" / f"{name.removeprefix('sample/')}.pth"
        return nandoctor.replay(dump).report
    if not packages:
        return diagnose(case_named(name), folder, fixes=True)
    # Two bugs need one package at different versions, so each is replayed in a process of its own.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_replay_beside, (name, folder, packages))


def _replay_beside(name: str, folder: Path, packages: list[Path]) -> Report:
    sys.path[:0] = map(str, packages)
    return diagnose(case_named(name), folder, fixes=True)


class _Judge:
    """A process that imports only the autocast of nandoctor, and forks for each fix."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-B", str(ROOT / "benchmarks" / "fix_judge.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def judge(self, name: str, fix: Fix, report: Report, folder: Path, packages: list[Path]) -> dict[str, Any]:
        """Apply the fix in a copy below `folder`, and run the step there with the packages that it imports."""
        where: dict[str, Any] = {
            "case": name,
            "reference": str(folder / "reference.pt"),
            "packages": list(map(str, packages)),
        }
        copy = Path(tempfile.mkdtemp(dir=folder))
        if not Path(where["reference"]).exists():
            copy_code(copy)
            made = self._ask({**where, "folder": str(copy), "kind": "reference"})
            if "raised" in made:
                return {"applied": True, **made}
            copy = Path(tempfile.mkdtemp(dir=folder))
        copy_code(copy)
        if fix.kind == "source" and not _apply(fix, copy, packages):
            return {"applied": False}
        job = {
            **where,
            "folder": str(copy),
            "kind": fix.kind,
            "patch": fix.patch,
            "settings": asdict(fix.settings) if fix.settings else None,
            "guilty": list(report.origin.elements.samples or ()) if report.origin else [],
        }
        return {"applied": True, **self._ask(job)}

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = Path(job["folder"], "answer.json")
        print(json.dumps({**job, "answer": str(answer)}), file=self._process.stdin, flush=True)
        self._process.stdout.readline()
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def copy_code(copy: Path) -> None:
    """Copy the code of the steps into a folder in which a fix may change it."""
    for name in ("benchmarks", "tests/sick_models", "tests/models", "sample_dumps"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))


def _apply(fix: Fix, copy: Path, packages: list[Path]) -> bool:
    """Run `git apply -p1` in the copy of this repository, or in one of the library that the diff changes."""
    assert fix.patch_root is not None
    root = Path(fix.patch_root)
    place = copy if root == ROOT else _link_library(fix.patch, root, copy / "site-packages", packages)
    patch = copy / "fix.diff"
    patch.write_text(fix.patch)
    made = subprocess.run(["git", "apply", "-p1", str(patch)], cwd=place, capture_output=True, check=False)
    return made.returncode == 0


def _link_library(patch: str, root: Path, target: Path, packages: list[Path]) -> Path:
    """Copy the packages that the diff changes, with symbolic links for all files that it does not change.

    Returns where the diff applies.
    """
    changed = [line[6:] for line in patch.splitlines() if line.startswith("+++ b/")]
    link = partial(_link, {root / name for name in changed})
    for folder in (folder for folder in packages if root.is_relative_to(folder)):
        shutil.copytree(folder, target, copy_function=link)
        return target / root.relative_to(folder)
    for package in {name.partition("/")[0] for name in changed}:
        shutil.copytree(root / package, target / package, copy_function=link)
    return target


def _link(changed: set[Path], source: str, place: str) -> None:
    if Path(source) in changed:
        shutil.copy2(source, place)
    elif Path(source).suffix != ".pyc" or Path(source).name.split(".")[0] not in {path.stem for path in changed}:
        Path(place).symlink_to(source)


def _failures(verdict: dict[str, Any]) -> list[str]:
    """Return the batches on which the output, or a loss that is finite in fp32, is not finite."""
    batches = verdict.get("batches", {}).items()
    return [name for name, run in batches if not run["finite"] or (not run["loss"] and run["reference"])]


def _bad_gradients(verdict: dict[str, Any]) -> list[str]:
    return [
        f"{name}/{loss}"
        for name, run in verdict.get("batches", {}).items()
        for loss, made in run["gradients"].items()
        if made["scale"] is None
    ]


def _harmed(verdict: dict[str, Any]) -> float:
    """Return the worst healthy sample's error; scaled batches do not count, as an eps weighs differently there."""
    batches = verdict.get("batches", {}).items()
    return max((run["harm"] for name, run in batches if name not in ("halved", "doubled")), default=0.0)


def _count(verdict: dict[str, Any]) -> dict[str, int]:
    first = verdict.get("batches", {}).get("as it failed")
    errors = [made["error"] for made in first["gradients"].values() if made["error"] is not None] if first else []
    return {
        "fixes": 1,
        "applied": verdict["applied"],
        "ran": bool(first),
        "fixed on the failing batch": bool(first) and "as it failed" not in _failures(verdict),
        "fixed on the failing batch and five others": bool(first) and not _failures(verdict),
        HARMS: _harmed(verdict) > 0,
        MADE_UP: bool(first) and first["made up"],
        NONFINITE: bool(_bad_gradients(verdict)),
        OFF: any(error > LARGEST_GRADIENT_ERROR for error in errors),
    }


def _is_right(verdict: dict[str, Any]) -> bool:
    """Return True if the fix means what the unchanged step does, in fp32 or float64 where that is finite."""
    counts = _count(verdict)
    return bool(counts["fixed on the failing batch"]) and not any(
        counts[fault] for fault in (HARMS, NONFINITE, OFF, MADE_UP)
    )


def _row(name: str, fix: Fix, verdict: dict[str, Any]) -> str:
    applied = "raised" if "raised" in verdict else "yes" if verdict["applied"] else "NO"
    told = [MADE_UP] if _count(verdict)[MADE_UP] else []
    told += [*_bad_gradients(verdict), *([f"harm {_harmed(verdict):.2g}"] if _harmed(verdict) else [])]
    first = verdict.get("batches", {}).get("as it failed", {"gradients": {}})
    told += [
        f"{loss}: {100 * made['error']:.2g} % off at scale {made['scale']:g}"
        for loss, made in first["gradients"].items()
        if made["error"] is not None and made["scale"] is not None and made["error"] > LARGEST_GRADIENT_ERROR
    ]
    if "raised" in verdict:
        told.append(verdict["raised"].strip().splitlines()[-1])
    return ROW.format(name, fix.rank, fix.kind, fix.title[:58], applied, ", ".join(_failures(verdict)), ", ".join(told))


if __name__ == "__main__":
    main()
