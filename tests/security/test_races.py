"""Threads and processes that do the same at the same time: nothing is lost, written over or left behind."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from nandoctor.dumps import file_type, reader, signature
from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.writer import write_dump
from nandoctor.errors import DumpError
from nandoctor.views.save import write_text

NUM_AT_ONCE = 8


def at_once(function, rounds):
    """What the function gives to each of some threads that begin together, round by round."""
    barrier = Barrier(NUM_AT_ONCE)

    def call(number):
        barrier.wait(timeout=60)
        return function(number)

    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        for _ in range(rounds):
            yield list(threads.map(call, range(NUM_AT_ONCE)))


def record(number):
    return {"format": "nandoctor.dump/1", "state_dict": {"weight": torch.full((4,), float(number))}}


def test_one_key_is_made_by_many_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path / "config"))
    path = tmp_path / "config" / "signing-key"
    for keys in at_once(lambda _: signature._make_key() or signature.read_key()[0], rounds=25):
        assert len(set(keys)) == 1
        assert [item.name for item in path.parent.iterdir()] == [path.name]
        path.unlink()


def test_a_key_is_not_written_over(tmp_path, monkeypatch):
    """Two that both found no key: the second takes that of the first."""
    monkeypatch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path))
    first = signature._make_key()
    monkeypatch.setattr(Path, "exists", lambda _: False)
    second = signature._make_key() or signature.read_key()[0]
    assert first == second == signature.read_key()[0]


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_dumps_of_many_at_once_are_all_kept(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    monkeypatch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setattr(os, "umask", None)  # it is the whole process's: another thread's file would be open to all
    folder = tmp_path / "dumps"
    for paths in at_once(lambda n: write_dump(record(n), folder, "nan-step1"), rounds=5):
        assert len(set(paths)) == NUM_AT_ONCE
        assert [float(read_dump(path).state["weight"][0]) for path in paths] == [*map(float, range(NUM_AT_ONCE))]
        assert all(read_dump(path).provenance.own == links for path in paths)  # no key can be kept without links
    assert len(list(folder.iterdir())) == 5 * NUM_AT_ONCE


def test_a_report_that_many_write_is_one_of_theirs(tmp_path):
    texts = [str(number) * 100_000 for number in range(NUM_AT_ONCE)]
    for _ in at_once(lambda number: write_text(texts[number], tmp_path / "report.md"), rounds=10):
        assert (tmp_path / "report.md").read_text() in texts
    assert [item.name for item in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.parametrize("change", ["grows", "shrinks", "is written again"])
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, change):
    path = write_dump(record(0), tmp_path, "nan-step1")
    look, nbytes = os.fstat, path.stat().st_size

    def look_and_change(descriptor):
        found = look(descriptor)
        os.truncate(path, {"grows": nbytes + 1, "shrinks": nbytes - 1}.get(change, nbytes))
        os.utime(path, ns=(1, 1))
        return found

    monkeypatch.setattr(file_type.os, "fstat", look_and_change)
    with pytest.raises(DumpError, match="it changed while it was read"):
        read_dump(path)


@pytest.mark.parametrize("nbytes", [1, 1 << 28], ids=["mapped", "copied"])
def test_a_file_that_is_replaced_or_gone_is_read_to_its_end(tmp_path, monkeypatch, nbytes):
    path = write_dump(record(3), tmp_path, "nan-step1")
    load = reader.load_pickle
    monkeypatch.setattr(file_type, "_MAPPED_NBYTES", nbytes)
    monkeypatch.setattr(reader, "load_pickle", lambda container: (path.unlink(), load(container))[1])
    dump = read_dump(path)
    assert dump.provenance.own
    assert dump.state["weight"].tolist() == [3.0] * 4


IN_A_WORKER = """
from pathlib import Path

from nandoctor.fleet.pool import open_workers
from nandoctor.fleet.worker import Job
from nandoctor.step.settings import Settings

if __name__ == "__main__":
    job = Job(path=Path("none.pth"), shown="none.pth", key="", settings=Settings(), cwd=Path.cwd())
    with open_workers(executor=None, jobs=1, scheduler=None) as run:
        (answer,) = run([job])
    print(answer.result.reason)
"""


@pytest.mark.slow
def test_a_worker_imports_nothing_beside_a_dump(tmp_path):
    """A new process imports a few modules before it takes over our import path; so does the one that counts locks."""
    script, folder = tmp_path / "triage.py", tmp_path / "dumps"
    script.write_text(IN_A_WORKER)
    folder.mkdir()
    for name in ("multiprocessing", "random", "signal", "struct"):
        (folder / f"{name}.py").write_text("raise SystemExit(open('canary', 'a').write(__name__))")
    command = [sys.executable, str(script)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert "no such file" in run.stdout, run.stderr
    assert not (folder / "canary").exists()
