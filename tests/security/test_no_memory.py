"""Memory that runs out: told as that, at whichever run of a step it happens, and no change is said to fail for it."""

import os

import pytest
import torch
from commands import run
from torch import nn

from nandoctor import replay
from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError, ModelError
from nandoctor.machine import is_out_of_memory

COUNT = "NANDOCTOR_TEST_RUNS"  # a replay puts back what a model keeps, and not the environment


class Greedy(nn.Module):
    """Overflows in fp16; from the run `enough` on it asks for more memory than there is, at one place of its step."""

    enough, place = 99, "forward"

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        os.environ[COUNT] = str(int(os.environ[COUNT]) + 1)
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.take("backward"))
        x = x * x * 3e5
        self.take("forward")
        return self.last(x)

    def take(self, place):
        if place == self.place and int(os.environ[COUNT]) > self.enough:
            torch.empty(1 << 60)


def loss_of(output, _batch):
    Greedy.take(Greedy, "loss")
    return output.float().square().mean()


@pytest.fixture
def dump(tmp_path):
    torch.manual_seed(0)
    x = 5 * torch.randn(4, 8)
    step = {"state_dict": Greedy().state_dict(), "x": x, "logit": torch.full((4, 8), float("nan"))}
    torch.save(step, tmp_path / "dump.pth")
    return tmp_path / "dump.pth"


def replayed(dump, monkeypatch, *, enough, place="forward"):
    monkeypatch.setenv(COUNT, "0")
    monkeypatch.setattr(Greedy, "enough", enough)
    monkeypatch.setattr(Greedy, "place", place)
    return replay(dump, Greedy, loss=loss_of, inputs="x").report


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "loss"])
def test_no_change_fails_for_want_of_memory(dump, monkeypatch, place):
    found = {fix.title: fix.outcome.finite for fix in replayed(dump, monkeypatch, enough=99).fixes}
    told = 0
    for enough in (2, 6, 10):
        report = replayed(dump, monkeypatch, enough=enough, place=place)
        assert all(fix.outcome.finite or not found[fix.title] for fix in report.fixes if fix.title in found)
        assert not any("budget" in note for note in report.search_notes)
        told += any(note.startswith("Not tried, because memory ran out: ") for note in report.search_notes)
    assert told == 3


def test_memory_after_the_failure_is_not_the_changes_fault(dump, monkeypatch):
    report = replayed(dump, monkeypatch, enough=3)
    assert report.verdict == "precision"
    assert not report.fixes
    assert any(
        note.startswith("Not tried, because memory ran out: the rest of changes") for note in report.search_notes
    )


@pytest.mark.parametrize("place", ["forward", "loss"])
def test_what_runs_out_of_memory_is_not_blamed(dump, monkeypatch, place):
    with pytest.raises(ModelError, match="not enough memory to run the step"):
        replayed(dump, monkeypatch, enough=-1, place=place)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(12, "Cannot allocate memory"), torch.OutOfMemoryError("CUDA out of memory."),
     RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)"), RuntimeError("std::bad_alloc"),
     ImportError("libtorch.so: failed to map segment from shared object"),
     RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")],
    ids=lambda error: f"{type(error).__name__} {error}"[:30],
)  # fmt: skip
def test_the_end_of_memory_is_one_line_wherever_it_comes(dump, monkeypatch, error):
    def end(*_, **__):
        raise error

    assert is_out_of_memory(error)
    with monkeypatch.context() as patched:
        patched.setattr("nandoctor.dumps.reader.load_pickle", end)
        with pytest.raises(DumpError, match="not enough memory to read its"):
            read_dump(dump)
    monkeypatch.setattr("nandoctor.dumps.dump.summarize", end)
    result = run("inspect", dump)
    assert result.exit_code == 1
    assert result.stderr.startswith("nandoctor: there is not enough memory")
    assert "Traceback" not in result.stderr
