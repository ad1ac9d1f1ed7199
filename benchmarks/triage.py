"""Many dumps: a loop in the shell beside `nandoctor triage`, by processor time and by cores.

In: `python benchmarks/triage.py [NUMBER]` (40). Out: seconds of the wall and of the processor for each way, their
ratios, and exit code 1 where a dump is in a wrong group. Both only diagnose.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fleet.many_dumps import CAUSES, make_dumps  # noqa: E402

from nandoctor.machine import count_cores  # noqa: E402

COMMAND = (sys.executable, "-m", "nandoctor")
ROW = "{:<26} {:>9} {:>12} {:>14} {:>14}"


def main() -> int:
    """Print the table."""
    number = int((*sys.argv[1:], "40")[0])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        truth = {str(path.relative_to(folder)): cause for path, cause in make_dumps(folder, number).items()}
        print(f"{number} dumps of {len(CAUSES)} causes, diagnosis only, {count_cores()} cores")
        print(ROW.format("", "wall s", "processor s", "s per dump", "times the loop"))
        loop = show("shell loop", number, run_loop(folder, list(truth)), None)
        for jobs in sorted({1, count_cores()}):
            output = folder / f"triage-{jobs}"
            timing = measure(folder, ["triage", "runs", "--no-fixes", "--jobs", str(jobs), "-o", str(output)])
            show(f"triage, {jobs} worker{'s' * (jobs > 1)}", number, timing, loop)
        wrong = list_wrong(output / "triage.jsonl", truth)
    print(f"in the right group: {number - len(wrong)} of {number}")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def run_loop(folder: Path, paths: list[str]) -> tuple[float, float]:
    """One command for each dump, as a shell script would."""
    timings = [measure(folder, ["replay", path, "--no-fixes", "-o", f"{path}.json"]) for path in paths]
    return sum(wall for wall, _ in timings), sum(busy for _, busy in timings)


def measure(folder: Path, arguments: list[str]) -> tuple[float, float]:
    """Seconds of the wall, and of the processor in all processes that were started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began, used = time.perf_counter(), busy_seconds()
    done = subprocess.run([*COMMAND, *arguments], cwd=folder, env=environment, capture_output=True, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(done.stderr.decode())
    return time.perf_counter() - began, busy_seconds() - used


def busy_seconds() -> float:
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def show(name: str, number: int, timing: tuple[float, float], loop: tuple[float, float] | None) -> tuple[float, float]:
    """Print one way, beside the loop in the wall's time."""
    wall, busy = timing
    ratio = f"{loop[0] / wall:.1f}x faster" if loop is not None else ""
    print(ROW.format(name, f"{wall:.1f}", f"{busy:.1f}", f"{wall / number:.2f}", ratio), flush=True)
    return timing


def list_wrong(lines: Path, truth: dict[str, str]) -> list[str]:
    """The dumps that are in no group of their cause, or in one of several."""
    groups = [line for line in map(json.loads, lines.read_text().splitlines()) if line["kind"] == "group"]
    found = {path: group["cause"] for group in groups for path in group["paths"]}
    wrong = [f"{path}: {found.get(path)}, not {cause}" for path, cause in truth.items() if found.get(path) != cause]
    return wrong + [f"{len(groups)} groups, not {len(CAUSES)}"] * (len(groups) != len(CAUSES))


if __name__ == "__main__":
    raise SystemExit(main())
