"""What a container gives a process is what nandoctor takes; what the replayed code warns of stays off the screen."""

import os
import subprocess
import sys

import pytest
import torch

from nandoctor import machine


@pytest.fixture
def quota(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    return (tmp_path / "cpu.max").write_text


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 64), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("", 64)]
)
def test_cores_are_those_of_the_containers_quota(quota, text, cores):
    quota(text)
    assert machine.count_cores() == cores


@pytest.mark.parametrize(("text", "threads"), [("200000 100000", "2"), ("max 100000", None)])
def test_torch_starts_no_more_threads_than_there_are_cores(quota, monkeypatch, text, threads):
    quota(text)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    machine.share_cores()
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


def test_what_the_user_has_set_for_threads_stays(quota, monkeypatch):
    quota("200000 100000")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    machine.share_cores()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("7", "active")


NET = """
import warnings
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        warnings.warn("degrees of freedom")
        return super().forward(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "asked", "shown"), [("replay", "default", True), ("replay", "", False), ("triage", "", False)]
)
def test_a_command_shows_no_warnings_of_the_code(tmp_path, verb, asked, shown):
    (tmp_path / "net.py").write_text(NET)
    torch.save(
        {"state_dict": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "x": torch.ones(2)}, tmp_path / "d.pth"
    )
    command = [sys.executable, "-m", "nandoctor", verb, "d.pth", "--model", "net.py:Net"]
    command += ["--model-arg", "in_features=2", "--model-arg", "out_features=2", "--no-fixes"]
    environment = {**os.environ, "PYTHONWARNINGS": asked}
    done = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 3)
    assert ("degrees of freedom" in done.stderr) == shown
