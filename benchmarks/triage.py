"""Compare `nandoctor triage` on many dumps with a shell loop, by wall time, processor time and cores.

`python benchmarks/triage.py [NUMBER [LOOPED]]` (40, and 20 of them in the loop) prints wall and processor seconds for
each way, and the time per dump relative to the loop. Exit code 1 if a dump is in the wrong group, or if the workers of
a local Dask cluster make other groups. All runs only diagnose. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
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

import distributed  # noqa: E402
from fleet.many_dumps import CAUSES, make_dumps  # noqa: E402

from nandoctor.machine import count_cores  # noqa: E402

COMMAND = (sys.executable, "-m", "nandoctor")
Timing = tuple[float, float | None]
"""Wall seconds, and processor seconds if known."""
ROW = "{:<26} {:>9} {:>12} {:>14} {:>14}"


PR_SET_CHILD_SUBREAPER = 36
"""A number of prctl(2): orphans of a process that this one started become its children, so that their time is known."""


def main() -> int:
    """Print the table."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    number, looped = map(int, (*sys.argv[1:], *("40", "20")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        truth = {str(path.relative_to(folder)): cause for path, cause in make_dumps(folder, number).items()}
        print(f"{number} dumps of {len(CAUSES)} causes, diagnosis only, {count_cores()} cores")
        print(ROW.format("", "wall s", "processor s", "s per dump", "times the loop"))
        sample = list(truth)[:looped]
        loop = show(f"shell loop, {len(sample)} of them", len(sample), run_loop(folder, sample), None)
        found = []
        for jobs in sorted({1, count_cores()}):
            arguments = ["triage", "runs", "--no-fixes", "--jobs", str(jobs), "-o", f"triage-{jobs}"]
            show(f"triage, {jobs} worker{'s' * (jobs > 1)}", number, measure(folder, arguments), loop)
            found.append(read_groups(folder / f"triage-{jobs}"))
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            address = cluster.scheduler_address
            wall, _ = measure(folder, ["triage", "runs", "--no-fixes", "--scheduler", address, "-o", "triage-dask"])
        show("triage, 2 workers of Dask", number, (wall, None), loop)
        found.append(read_groups(folder / "triage-dask"))
    wrong = list_wrong(found[0], truth)
    print(f"in the right group: {number - len(wrong)} of {number}")
    print("".join(f"{line}\n" for line in wrong), end="")
    alike = all(groups == found[0] for groups in found)
    print(f"all ways make the same groups: {'yes' if alike else 'no'}")
    return 1 if wrong or not alike else 0


def run_loop(folder: Path, paths: list[str]) -> tuple[float, float]:
    """Run one command for each dump, as a shell script would; return the total seconds."""
    timings = [measure(folder, ["replay", path, "--no-fixes", "-o", f"{path}.json"]) for path in paths]
    return sum(wall for wall, _ in timings), sum(busy for _, busy in timings)


def measure(folder: Path, arguments: list[str]) -> tuple[float, float]:
    """Run a command; return its wall seconds, and the processor seconds of all processes that it started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began, used = time.perf_counter(), busy_seconds()
    command = [*COMMAND, *arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as started:
        _, errors = started.communicate()
    if started.returncode not in (0, 3):
        raise SystemExit(errors.decode())
    wall = time.perf_counter() - began
    with contextlib.suppress(ChildProcessError):  # workers that triage kills at its end, and does not wait for itself
        while True:
            os.waitpid(-started.pid, 0)
    return wall, busy_seconds() - used


def busy_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def show(name: str, number: int, timing: Timing, loop: float | None) -> float:
    """Print one way, relative to the loop in wall time, and return its seconds per dump."""
    wall, busy = timing
    ratio = f"{loop * number / wall:.1f}x faster" if loop is not None else ""
    used = f"{busy:.1f}" if busy is not None else ""
    print(ROW.format(name, f"{wall:.1f}", used, f"{wall / number:.2f}", ratio), flush=True)
    return wall / number


def read_groups(folder: Path) -> dict[str, list[str]]:
    """Return the paths in each group, by its cause and representative."""
    lines = map(json.loads, (folder / "triage.jsonl").read_text().splitlines())
    return {f"{line['cause']}: {line['representative']}": line["paths"] for line in lines if line["kind"] == "group"}


def list_wrong(groups: dict[str, list[str]], truth: dict[str, str]) -> list[str]:
    """Return a line for each dump in a group of another cause or in none, and one if the number of groups is wrong."""
    found = {path: name.partition(":")[0] for name, paths in groups.items() for path in paths}
    wrong = [f"{path}: {found.get(path)}, not {cause}" for path, cause in truth.items() if found.get(path) != cause]
    return wrong + [f"{len(groups)} groups, not {len(CAUSES)}"] * (len(groups) != len(CAUSES))


if __name__ == "__main__":
    raise SystemExit(main())
