"""What a container gives a process is what nandoctor takes."""

import os

import pytest

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
