"""Real workers: processes of this machine and of a Dask cluster, some of which die."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from fleet.many_dumps import CAUSES, make_dumps
from tiny_models import Overflowing

from nandoctor.fleet.triage import TriageOptions, triage

pytestmark = pytest.mark.slow

MODELS = """
import os, signal, time
import torch
from tiny_models import Overflowing

class Deadly(Overflowing):
    def forward(self, x):
        if os.path.exists("deadly") and float(x.flatten()[0]) == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

class Endless(Overflowing):
    def forward(self, x):
        time.sleep(600 if float(x.flatten()[0]) == 13 else 0)
        return super().forward(x)

class Greedy(Overflowing):
    def forward(self, x):
        torch.ones(10**13 if float(x.flatten()[0]) == 13 else 1)
        return super().forward(x)
"""
NUMBER = 5
MORE = 60
ANALYSED = ["analysed"] * (NUMBER - 1)


@pytest.fixture
def workplace(here):
    """Five dumps, of which the third has a sample that its model cannot stand."""
    (here / "models_of_the_test.py").write_text(MODELS)
    (here / "deadly").touch()
    (here / "runs").mkdir()
    for step in range(NUMBER):
        image = torch.full((2, 4), 13.0 if step == 2 else float(step + 1))
        torch.save({"state_dict": Overflowing().state_dict(), "image": image, "step": step}, f"{here}/runs/{step}.pth")
    return here


def options(model, **more):
    return TriageOptions(settings={"model": f"models_of_the_test.py:{model}", "fixes": False}, jobs=2, **more)


def outcomes(found):
    return {result.path: result.outcome for result in found.dumps}


@pytest.mark.parametrize(
    ("model", "more", "outcome"),
    [
        ("Deadly", {}, "died"),
        ("Endless", {"timeout_s": 15.0}, "timed-out"),
        ("Greedy", {}, "out-of-memory"),
    ],
)
def test_a_worker_that_ends_costs_its_own_file(workplace, model, more, outcome):
    found = outcomes(triage(["runs"], options(model, **more)))
    assert found.pop("runs/2.pth") == outcome
    assert list(found.values()) == ANALYSED


def test_models_of_two_files_have_processes_of_their_own(here):
    """They may import modules of the same name."""
    tables = ["[tool.nandoctor]"]
    for name in ("first", "second"):
        (here / name).mkdir()
        (here / name / "net.py").write_text(f"import layers\nOf{name} = layers.Of{name}\n")
        (here / name / "layers.py").write_text(f"from tiny_models import Overflowing as Of{name}\n")
        torch.save({"state_dict": Overflowing().state_dict(), "image": torch.ones(2, 4)}, here / name / "nan.pth")
        tables.append(f'[[tool.nandoctor.dumps]]\npattern = "{name}/*"\nmodel = "{name}/net.py:Of{name}"')
    (here / "pyproject.toml").write_text("\n".join(tables))
    found = outcomes(triage(["first", "second"], TriageOptions(settings={"fixes": False}, jobs=1)))
    assert found == {"first/nan.pth": "analysed", "second/nan.pth": "analysed"}


INTERRUPTIBLE = """
import signal
from nandoctor.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
COMMAND = ("triage", "runs", "--jobs", "1", "--json", "--no-fixes")


def start(*more):
    """Begin a triage that an interrupt reaches, also where the tests run in the background and pass none on."""
    command = [sys.executable, "-c", INTERRUPTIBLE, *COMMAND, "--model", "models_of_the_test.py:Overflowing", *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def wait_for_results(folder, number):
    deadline = time.monotonic() + 300
    while len(list((folder / "nandoctor-triage" / "results").glob("*.json"))) < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop_in_the_middle(workplace, ending):
    """What a triage has written that was stopped after at least two more results."""
    results = workplace / "nandoctor-triage" / "results"
    begun = len(list(results.glob("*.json")))
    process = start()
    wait_for_results(workplace, begun + 2)
    process.send_signal(ending)
    stdout, _ = process.communicate(timeout=300)
    assert process.returncode == (130 if ending == signal.SIGINT else -signal.SIGKILL)
    written = {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert begun + 2 <= len(written) < NUMBER + MORE
    if ending == signal.SIGINT:
        assert json.loads(stdout.splitlines()[-1])["num_left"] > 0
    return written


def test_stopped_in_the_middle_it_does_no_file_twice(workplace):
    """Twice: by a signal that nothing can be done about, and by the user."""
    for number in range(MORE):
        path = workplace / "runs" / f"more-{number}.pth"
        torch.save({"state_dict": Overflowing().state_dict(), "image": torch.ones(2, 4), "step": 100 + number}, path)
    first = stop_in_the_middle(workplace, signal.SIGKILL)
    before = stop_in_the_middle(workplace, signal.SIGINT)
    assert {path: before[path] for path in first} == first
    stdout, _ = start().communicate(timeout=240)
    whole = json.loads(stdout.splitlines()[-1])
    assert (whole["num_reused"], whole["num_left"]) == (len(before), 0)
    after = {path: path.stat().st_mtime_ns for path in (workplace / "nandoctor-triage" / "results").glob("*.json")}
    assert len(after) == NUMBER + MORE
    assert all(json.loads(path.read_text())["outcome"] == "analysed" for path in after)
    assert {path: after[path] for path in before} == before


@contextmanager
def open_cluster():
    """The address of a cluster whose workers start as fast as ours, and of which a task may kill one, not four."""
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    ways = {"distributed.worker.multiprocessing-method": "forkserver", "distributed.scheduler.allowed-failures": 0}
    ways["distributed.scheduler.worker-saturation"] = 1.0  # a file that waits at a killed worker counts as its failure
    with (
        dask.config.set(ways),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
    ):
        yield cluster.scheduler_address


def test_processes_and_cluster_find_the_same_groups(here):
    truth = make_dumps(here, len(CAUSES) + 4)
    settings = {"fixes": False}
    local = triage(["runs"], TriageOptions(folder=here / "local", settings=settings, jobs=2))
    with open_cluster() as address:
        remote = triage(["runs"], TriageOptions(folder=here / "remote", settings=settings, scheduler=address))
    assert [group.paths for group in local.groups] == [group.paths for group in remote.groups]
    assert len(local.groups) == len(CAUSES)
    for group in local.groups:
        assert {truth[here / path] for path in group.paths} == {group.cause}


def test_a_killed_worker_of_a_cluster_costs_one_file(workplace):
    with open_cluster() as address:
        found = outcomes(triage(["runs"], options("Deadly", scheduler=address)))
    assert found.pop("runs/2.pth") == "died"
    assert list(found.values()) == ANALYSED
