"""Freeze what nandoctor says of every known case, and show where it says something else now.

`python benchmarks/outcomes.py -o FILE` replays every case and writes a line of JSON for each, sorted by name.
`python benchmarks/outcomes.py --against benchmarks/outcomes.jsonl` prints each case of which anything else is said, and
exits with 1 if there is one. `--only GLOB` takes the cases whose name fits (`'sick/*'`, `'*mask*'`); with `-o` the
file's other lines are kept. `--real-bugs CACHE` adds the bugs of released packages, which pip fetches into that folder.

The names: `sick`, its `twin`, `renamed` and `decoyed` variants and the `innocent` ones (that look ill), `library`,
`sample`, `stranger` (a row of `tests/strangers`, or a replay in a test there), `real`.
All are examined in two processes of one thread each. Searches are bounded by runs, never by time, so that the answer
does not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

Outcome = dict[str, Any]
Outcomes = dict[str, Outcome]
Job = tuple[str, str]
"""A kind of case, and what to examine of it: a name, or a file of tests."""

STRANGERS = ROOT / "tests" / "strangers"
WRITTEN_DOWN = {STRANGERS / "test_rows.py"}
"""Tests of what is examined by itself, as a row."""
LIBRARIES = ("bert-dense", "bert-scores", "t5-dense", "llama-query", "vit-query", "torch-encoder-layer")
NUM_PROCESSES = 2


def main() -> int:
    """Examine what is asked for; write or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", dest="file", type=Path, help="write the outcomes to this file")
    parser.add_argument("--against", type=Path, help="print what differs from the outcomes in this file")
    parser.add_argument("--only", default="*", help="cases whose name fits this pattern")
    parser.add_argument("--real-bugs", dest="cache", type=Path, help="the folder with the packages of real bugs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    found = examine(options.only, options.cache)
    print(f"{len(found)} cases in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    if options.file:
        kept = read(options.file) if options.file.exists() else {}
        write({name: kept[name] for name in kept if not _is_asked(name, options)} | found, options.file)
    if not options.against:
        return 0
    frozen = {name: outcome for name, outcome in read(options.against).items() if _is_asked(name, options)}
    differing = list(differences(frozen, found))
    print(*differing, f"{len(differing)} of {len(frozen | found)} cases differ", sep="\n")
    return 1 if differing else 0


def _is_asked(name: str, options: argparse.Namespace) -> bool:
    return fnmatchcase(name, options.only) and (options.cache is not None or not name.startswith("real/"))


# --- a file of outcomes, and what two of them have in common


def write(outcomes: Outcomes, file: Path) -> None:
    """Write a line for each outcome, sorted by name."""
    lines = [json.dumps({"case": name, **outcomes[name]}, ensure_ascii=False) for name in sorted(outcomes)]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(file: Path) -> Outcomes:
    """Read what `write` wrote."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row.pop("case"): row for row in rows}


def differences(before: Outcomes, after: Outcomes) -> Iterator[str]:
    """Yield a block of text for each case of which not the same is said."""
    for name in sorted(before | after):
        if name not in after:
            yield f"{name}\n  is gone\n"
        elif name not in before:
            yield f"{name}\n  is new: {json.dumps(after[name], ensure_ascii=False)}\n"
        elif before[name] != after[name]:
            yield "\n".join([name, *_changed_fields(before[name], after[name]), ""])


def _changed_fields(before: Outcome, after: Outcome) -> Iterator[str]:
    for field in before | after:
        old, new = before.get(field), after.get(field)
        if old != new and isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
            changes = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1)
            yield "\n".join([f"  {field}:", *(f"    {line}" for line in changes)])
        elif old != new:
            yield f"  {field}: {json.dumps(old, ensure_ascii=False)} -> {json.dumps(new, ensure_ascii=False)}"


# --- what is kept of a report


def outcome_of(report: Any, folder: Path) -> Outcome:
    """Return what a report says, without what is empty; `folder`, where the dump was, is not named."""
    origin, fixes = report.origin, report.fixes
    first = min(fixes, key=lambda fix: (not fix.verified, fix.rank), default=None)
    failed = Counter(check.name for fix in fixes for check in fix.checks if check.status == "failed")
    said: Outcome = {
        "verdict": report.verdict,
        "grade": report.reproduction.grade if report.reproduction else None,
        "phase": origin and origin.phase,
        "module": origin and origin.place.module,
        "op": origin and origin.op,
        "line": origin and origin.source and f"{_place_of(origin.source.file, folder)}: {origin.source.text}",
        "cause": report.cause and report.cause.code,
        "samples": origin and origin.elements.samples and list(origin.elements.samples),
        "also": [other.cause.code for other in report.also if other.cause],
        "fix": first and re.sub(r"\bline \d+ of", "line N of", first.title),
        "text": first and _text_of(first, folder),
        "verified": [sum(fix.verified for fix in fixes), len(fixes)] if fixes else None,
        "failed": dict(sorted(failed.items())),
    }
    return {field: value for field, value in said.items() if value or value == ""}


def _place_of(file: str, folder: Path) -> str:
    """Name a file as the repository or the package does that it belongs to, in which it may move up or down."""
    path = Path(file).resolve()
    if path.is_relative_to(folder):
        return path.name
    own = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path  # the README's environment is in that folder
    return re.sub(r".*/(site-packages|lib/python[\d.]+)/", "", str(own))


def _text_of(fix: Any, folder: Path) -> str:
    """Return a fix's patch without the lines' numbers, or its settings."""
    settings = f"{fix.settings}\n" if fix.settings else ""
    patch = re.sub(r"^@@ .*? @@.*$", "@@", fix.patch, flags=re.MULTILINE)
    return (settings + patch).replace(f"{folder}/", "").replace(f"{ROOT}/", "")


def outcome_or_error(diagnose: Callable[[], Any], folder: Path) -> Outcome:
    """Return what the report says, or which error there was instead."""
    try:
        report = diagnose()
    except Exception as error:  # of the step, of torch, or of nandoctor: all that a user would see
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"error": re.sub(r"\.py:\d+", ".py", said.replace(f"{folder}/", "").replace(f"{ROOT}/", ""))}
    return outcome_of(report, folder)


# --- the cases


def examine(pattern: str, cache: Path | None) -> Outcomes:
    """Return the outcomes of all cases whose names fit the pattern; of real bugs if a cache is given."""
    jobs = [*_jobs(pattern), *(_real_jobs(pattern, cache) if cache else ())]
    found: Outcomes = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context, initializer=_begin) as pool:
        for outcomes in pool.map(_examine_job, jobs, [pattern] * len(jobs), [cache] * len(jobs)):
            found |= outcomes
    return found


def _begin() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    os.chdir(ROOT)  # whose pyproject.toml names the models of the sample dumps


def _jobs(pattern: str) -> list[Job]:
    """List what to examine, that which takes longest first."""
    from sick_models import all_cases, healthy_models
    from strangers import all_rows

    names = {
        "library": LIBRARIES,
        "sample": sorted(path.stem for path in (ROOT / "sample_dumps").glob("*.pth")),
        "stranger": list(all_rows()),
        **{kind: [case.name for case in all_cases()] for kind in VARIANTS},
        "innocent": [case.name for case in healthy_models()],
    }
    jobs = [(kind, name) for kind in names for name in names[kind] if _fits(f"{kind}/{name}", pattern)]
    files = sorted(set(STRANGERS.glob("test_*.py")) - WRITTEN_DOWN, key=lambda path: -path.stat().st_size)
    asked = [path for path in files if _may_fit(f"stranger/{path.stem.removeprefix('test_')}/", pattern)]
    return [*(("tests", str(path)) for path in asked), *jobs]


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f"{name} (healthy)", pattern)


def _may_fit(beginning: str, pattern: str) -> bool:
    """Tell whether a name that begins so can fit the pattern."""
    fixed = re.split(r"[*?\[]", pattern)[0]
    return fixed.startswith(beginning) or beginning.startswith(fixed)


def _examine_job(job: Job, pattern: str, cache: Path | None) -> Outcomes:
    kind, name = job
    if kind == "tests":
        return examine_tests(Path(name), pattern)
    if kind == "real":
        assert cache is not None
        return _examine_real(name, cache)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        if kind == "stranger":
            return {f"stranger/{name}": outcome_or_error(lambda: _replay_row(name, folder), folder)}
        if kind == "sample":
            return {f"sample/{name}": outcome_or_error(lambda: _replay_sample(name), folder)}
        return {f"{kind}/{name}": examine_case(kind, name, folder)}


def examine_case(kind: str, name: str, folder: Path) -> Outcome:
    """Return the outcome of one of a case's variants."""
    from sick_models import all_cases, healthy_models
    from sick_models.judging import diagnose

    if kind == "library":
        from fix_cases import CASES  # it takes seconds to import transformers

        case = CASES[f"library/{name}"]
    else:
        cases = {case.name: case for case in (*all_cases(), *healthy_models())}
        case = VARIANTS.get(kind, lambda case: case)(cases[name])
    return outcome_or_error(lambda: diagnose(case, folder, fixes=kind in ("sick", "library")), folder)


def _twin(case: Any) -> Any:
    return case.twin()


def _renamed(case: Any) -> Any:
    from sick_models import renamed

    return renamed(case)


def _decoyed(case: Any) -> Any:
    from sick_models import decoyed

    return decoyed(case)


VARIANTS: Mapping[str, Callable[[Any], Any]] = {
    "sick": lambda case: case,
    "twin": _twin,
    "renamed": _renamed,
    "decoyed": _decoyed,
    "twin-decoyed": lambda case: _decoyed(_twin(case)),
}


def _replay_row(name: str, folder: Path) -> Any:
    from strangers import all_rows
    from strangers.rows import replay

    return replay(all_rows()[name], folder, fixes=True, time=float("inf"))


def _replay_sample(name: str) -> Any:
    import nandoctor

    return nandoctor.replay(f"sample_dumps/{name}.pth", time=float("inf")).report


# --- the strangers that are no rows, but tests of their own


def examine_tests(file: Path, pattern: str = "*") -> Outcomes:
    """Run the tests of a file, and return what every replay in them said."""
    import pytest

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        witness = Witness(folder, pattern)
        every_test = ["-o", "addopts=", f"--basetemp={folder / 'of'}", str(file)]
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(every_test, plugins=[witness])
        return witness.outcomes


class Witness:
    """Notes what `nandoctor.replay` says in each test; what is tested with and without fixes is run with them."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self.outcomes: Outcomes = {}
        self._folder, self._pattern, self._test = folder, pattern, ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what is not asked for."""
        items[:] = [item for item in items if self._is_asked(item)]

    def _is_asked(self, item: Any) -> bool:
        arguments = item.callspec.params if hasattr(item, "callspec") else {}
        return arguments.get("examine", True) and fnmatchcase(_name_of(item), self._pattern)

    def pytest_runtest_setup(self, item: Any) -> None:
        """Note which test is to come."""
        self._test = _name_of(item)

    def pytest_sessionstart(self) -> None:
        """Stand between the tests and `nandoctor.replay`."""
        import nandoctor

        self._replay = nandoctor.replay
        nandoctor.replay = self._replay_and_note

    def pytest_sessionfinish(self) -> None:
        """Step aside."""
        import nandoctor

        nandoctor.replay = self._replay

    def _replay_and_note(self, *args: Any, **options: Any) -> Any:
        made: list[Any] = []

        def report() -> Any:
            made.append(self._replay(*args, **{"time": float("inf"), **options}))
            return made[0].report

        outcome = outcome_or_error(report, self._folder)
        self.outcomes[self._free_name()] = outcome
        return made[0] if made else self._replay(*args, **options)

    def _free_name(self) -> str:
        same = sum(name == self._test or name.startswith(f"{self._test} (") for name in self.outcomes)
        return f"{self._test} ({same + 1})" if same else self._test


def _name_of(item: Any) -> str:
    """Name a test without its file's ending, its class, and whether fixes were looked for."""
    name = re.sub(r"(?<=\[)(diagnosed|with fixes)-?", "", item.name)
    return f"stranger/{item.path.stem.removeprefix('test_')}/{name.removeprefix('test_').removesuffix('[]')}"


# --- bugs of released packages


def _real_jobs(pattern: str, cache: Path) -> Iterable[Job]:
    if not _may_fit("real/", pattern):
        return ()
    from real_bugs.ask import BUGS
    from real_bugs.bug import install

    chosen = [title for title in BUGS if fnmatchcase(f"real/{title}", pattern)]
    for title in chosen:
        install(BUGS[title].packages, cache)
    return [("real", title) for title in chosen]


def _examine_real(title: str, cache: Path) -> Outcomes:
    """Ask a process that has no other bug's packages about the bug and its control."""
    from real_bugs.ask import BUGS
    from real_bugs.bug import install

    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, "answers")
        command = [sys.executable, str(ROOT / "benchmarks" / "real_bugs" / "ask.py"), "outcomes", title, str(answers)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
        packages = map(str, install(BUGS[title].packages, cache))
        subprocess.run([*command, *packages], env=environment, capture_output=True, check=False)
        lines = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
    told = [json.loads(line) for line in lines] + 2 * [{"error": "the process crashed"}]
    return {f"real/{title}": told[0], f"real/{title} (control)": told[1]}


if __name__ == "__main__":
    sys.exit(main())
