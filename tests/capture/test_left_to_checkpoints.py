"""Weights without room in a dump: a replay takes them from a checkpoint."""

import shlex
import sys

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor import Recorder
from nandoctor.cli import main
from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

WIDTH = 96
MAX_NBYTES = 60_000  # the weights take 74,496 bytes
SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x):
        return torch.log(self.leave(self.norm(self.enter(x)).relu()))
"""


@pytest.fixture
def train(here, monkeypatch, caplog):
    """What trains for two steps, keeps the weights of each, and returns what was logged of the second, which fails."""
    (here / "net.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(here))

    def run(max_nbytes=MAX_NBYTES, **settings):
        import net

        torch.manual_seed(0)
        model = net.Net(WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"arguments": {"width": WIDTH}, "max_nbytes": max_nbytes, **settings}
        with Recorder(model, folder="dumps", **options) as recorder:
            for step in range(2):
                torch.save(model.state_dict(), f"step{step}.pt")
                x = torch.randn(8, WIDTH)
                output = model(x)
                recorder.watch(output.sum() if step else output.nan_to_num().sum(), x)
                output.nan_to_num(0, 0, 0).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return caplog.messages[-1]

    yield run
    sys.modules.pop("net", None)


def command_in(message):
    return shlex.split(message.partition("nandoctor replay ")[2])


def test_the_logged_command_replays_the_step(train):
    said = train()
    assert "without the weights, which would exceed max_nbytes" in said
    path, *flags = command_in(said)
    assert flags == ["--weights", "CHECKPOINT"]
    dump = read_dump(path)
    assert (sorted(dump.state), dump.holds_weights) == (
        ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"],
        False,
    )
    report = nandoctor.replay(path, weights="step1.pt", fixes=False).report
    assert report.reproduction.grade == "same-mask"
    assert report.cause.code == "invalid-domain"
    assert any("step1.pt, which may not be those of the failing step" in note for note in report.notes)
    with pytest.raises(SystemExit) as ended:
        main(["replay", path, "--weights", "step1.pt", "--no-fixes"])
    assert ended.value.code in (0, None)


def test_other_weights_than_those_in_the_file_are_told(train):
    path, *flags = command_in(train(max_nbytes=1 << 30))
    assert flags == []
    assert nandoctor.replay(path, fixes=False).report.reproduction.grade == "exact"
    for step in range(2):
        report = nandoctor.replay(path, weights=f"step{step}.pt", fixes=False).report
        assert report.reproduction.grade != "exact"
        assert any(f"step{step}.pt, which may not be those of the failing step" in note for note in report.notes)


def test_other_weights_never_verify(train):
    path, *_ = command_in(train())
    state = torch.load("step1.pt")
    state["leave.weight"], state["leave.bias"] = torch.zeros(WIDTH, WIDTH), torch.ones(WIDTH)
    torch.save(state, "sound.pt")
    found = nandoctor.verify(path, weights="sound.pt", changed=True)
    assert found.outcome == "cannot-tell"
    assert any("not known to be those of the failing step" in reason for reason in found.reasons)


def test_a_batch_and_a_checkpoint_make_a_step(here):
    torch.save({"image": torch.ones(2, 3)}, "batch.pth")
    with pytest.raises(DumpError, match="a batch alone was saved"):
        nandoctor.replay("batch.pth", nn.Linear(3, 2))
    torch.save(nn.Linear(3, 2).state_dict(), "linear.pt")
    assert nandoctor.replay("batch.pth", nn.Linear(3, 2), weights="linear.pt").verdict == "healthy"
    torch.save(nn.Linear(1, 1).state_dict(), "other.pt")
    with pytest.raises(nandoctor.NanDoctorError, match=r"do not fit Linear \(0 of 2 tensors do\)"):
        nandoctor.replay("batch.pth", nn.Linear(3, 2), weights="other.pt")
