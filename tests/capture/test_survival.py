"""Whatever happens to the file, the training's own error survives, and no half file is taken for a dump."""

import logging
import os
import subprocess
import sys
from collections import UserDict
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn

import nandoctor
from nandoctor import Recorder
from nandoctor.dumps.reader import read_dump


def fail_in(folder, batch=None, **options):
    model = nn.Linear(4, 4)
    recorder = Recorder(model, folder=folder, arguments={"in_features": 4, "out_features": 4}, **options)

    def step():
        with recorder.step(batch):
            recorder.watch(model(torch.full((1, 4), float("nan"))).sum())
            raise KeyError("the training's own error")

    with pytest.raises(KeyError, match="own error"):
        step()
    recorder.close()
    return recorder


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        recorder = fail_in(tmp_path / "file" / "dumps")
    assert recorder.written == ()
    assert "could not save nan-step000000" in caplog.messages[-2]
    assert "It could not be saved" in caplog.messages[-1]


def test_a_disk_that_is_full(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert fail_in(tmp_path).written == ()
    assert "could not save" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_step_beyond_the_cap_is_not_saved(tmp_path, caplog):
    assert fail_in(tmp_path, max_nbytes=50).written == ()
    assert any("without the weights, and max_nbytes of the Recorder is 50" in said for said in caplog.messages)


def test_a_file_that_is_being_written_is_no_orphan(tmp_path):
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    busy, dead = tmp_path / ".nan-step000001-a.tmp", tmp_path / ".nan-step000002-b.tmp"
    dead.write_bytes(b"half")
    command = [sys.executable, "-c", script, str(busy)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    writer.stdout.readline()
    (path,) = fail_in(tmp_path).written
    writer.kill()
    writer.communicate()
    assert sorted(tmp_path.iterdir()) == sorted([busy, path])


class Raises:
    def __getattr__(self, name):
        raise RuntimeError(name)


class RaisingMapping(UserDict):
    def __iter__(self):
        raise RuntimeError


class Text(str):
    __slots__ = ()


ODD_PARTS = [
    lambda x: x,
    sys.stderr,
    Raises(),
    RaisingMapping(),
    np.longdouble(3),
    Text("name"),
    torch.ones(2, device="meta"),
    torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", ODD_PARTS, ids=lambda part: type(part).__name__)
def test_an_odd_part_of_a_batch_is_left_out_and_named(tmp_path, part):
    (path,) = fail_in(tmp_path, batch={"image": torch.ones(2), 3: [{"part": part}]}).written
    dump = read_dump(path)
    assert dump.recorded.batch["image"]
    assert dump.recorded.batch[3][0]["part"] == ("name" if isinstance(part, str) else None)
    assert any(note.startswith("batch") for note in dump.missing) != isinstance(part, str)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "loss",
    ["text", {"loss": 1.0}, 10**400, torch.ones((), device="meta"), torch.eye(2).to_sparse(), Raises()],
    ids=lambda p: type(p).__name__,
)
def test_what_is_no_loss_does_not_end_a_training(tmp_path, caplog, loss):
    model = nn.Linear(4, 4)
    with Recorder(model, folder=tmp_path, threshold=1) as recorder:
        for value in (1.0, float("nan"), 1.0):
            model(torch.full((1, 4), value))
            recorder.watch(loss)
    assert len(recorder.written) == 1  # the output was looked at
    assert sum("which is not a loss" in message for message in caplog.messages) == 1


class Unlisted(nn.Linear):
    def modules(self):
        raise RuntimeError("not here")


class EngineLike(nn.Linear):
    __module__ = "deepspeed.runtime.engine"


class Unsure:
    def is_enabled(self):
        raise RuntimeError("not yet")


def lose_the_folder(tmp_path, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    return nn.Linear(3, 2), {"folder": tmp_path}


@pytest.mark.parametrize(
    "prepare",
    [
        lambda *_: (Unlisted(3, 2), {}),
        lambda *_: (EngineLike(3, 2), {}),
        lambda *_: (nn.Linear(3, 2), {"scaler": Unsure()}),
        lose_the_folder,
    ],
    ids=["model", "engine of DeepSpeed", "scaler", "folder"],
)
def test_a_training_that_cannot_be_described_goes_on(tmp_path, monkeypatch, caplog, prepare):
    model, options = prepare(tmp_path, monkeypatch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(model, **{"folder": tmp_path, "threshold": 0, **options}) as recorder:
        recorder.number_next(5, 3)
        for marks in (True, False):
            with recorder.step(torch.ones(3)) if marks else nullcontext():
                loss = (model(torch.ones(4, 3)) * float("nan")).sum()
                recorder.watch(loss, torch.ones(3))
                loss.backward()
                optimizer.step()
            assert recorder.save() is None
        recorder.begin()
        recorder.end()
    assert recorder.written == ()
    assert sum("is not recorded" in message for message in caplog.messages) == 1
    assert not model._forward_hooks


class NotReady(nn.Linear):
    @property
    def config(self) -> Any:
        raise RuntimeError("call from_pretrained() first")


class Closed(nn.ReLU):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise RuntimeError(name) from None


ODD = {
    "config": (NotReady(3, 2), None),
    "attributes": (Closed(), None),
    "mock": (nn.Linear(3, 2), MagicMock()),
}


@pytest.mark.parametrize(("model", "loss"), ODD.values(), ids=ODD.keys())
def test_what_cannot_be_looked_at_is_recorded(tmp_path, caplog, model, loss):
    arguments = {"in_features": 3, "out_features": 2}
    with Recorder(model, folder=tmp_path, arguments=arguments, loss=loss) as recorder:
        recorder.watch(model(torch.full((4, 3), float("nan"))).sum(), torch.ones(3))
    assert "is not recorded" not in caplog.text
    assert ("cannot import the loss" in caplog.text) == (loss is not None)
    report = nandoctor.replay(recorder.written[0], lambda: model, fixes=False).report
    assert report.reproduction.grade == "exact"
