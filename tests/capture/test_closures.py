"""Optimizers that are given a closure: the file holds the weights from before the update that followed it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor import Recorder
from nandoctor.dumps.reader import read_dump


class Log(nn.Module):
    """A logarithm of what one sample makes negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.linear(x).square() + x[:, :1])


def mean(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.mean()


@pytest.fixture(autouse=True)
def _in_the_folder_of_this_file(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)


def make():
    torch.manual_seed(0)
    return Log()


def batches(*, negative_at, number=5):
    torch.manual_seed(1)
    given = [torch.rand(4, 3) for _ in range(number)]
    given[negative_at][1, 0] = -100.0
    return given


def train(model, optimizer, given, recorder, *, explicit):
    """Returns the batch and the weights of each call of the model, and the losses."""
    seen, losses = [], []

    def evaluate(batch):
        optimizer.zero_grad()
        seen.append((batch, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
        loss = mean(model(batch), batch)
        if recorder is not None:
            recorder.watch(loss, batch)
        losses.append(loss.detach())
        loss.backward()
        return loss

    for batch in given:
        if recorder is not None and explicit:
            with recorder.step(batch):
                optimizer.step(lambda batch=batch: evaluate(batch))
        else:
            optimizer.step(lambda batch=batch: evaluate(batch))
    return seen, losses


OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.01, max_iter=4),
}
each_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_way = pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])


@each_optimizer
@each_way
def test_the_weights_are_those_of_the_failing_call(tmp_path, make_optimizer, explicit):
    model, given = make(), batches(negative_at=2)
    with Recorder(model, folder=tmp_path, loss=mean) as recorder:
        seen, _ = train(model, make_optimizer(model.parameters()), given, recorder, explicit=explicit)
    path = recorder.written[0]
    dump = read_dump(path)
    weights = next(weights for batch, weights in seen if batch is given[2])
    assert torch.equal(dump.arrays["input.x"], given[2])
    assert all(torch.equal(dump.state[name], tensor) for name, tensor in weights.items())
    assert (dump.scalars["step"], dump.scalars["reason"], dump.missing) == (2, "loss", ())
    report = nandoctor.replay(path, fixes=False).report
    assert (report.reproduction.grade, report.origin.op, report.cause.code) == ("exact", "log", "invalid-domain")


@each_optimizer
def test_training_is_bit_identical_with_the_recorder_on(tmp_path, make_optimizer):
    runs = []
    for folder in (None, tmp_path):
        model = make()
        recorder = Recorder(model, folder=folder, loss=mean) if folder else None
        seen, losses = train(
            model, make_optimizer(model.parameters()), batches(negative_at=3), recorder, explicit=False
        )
        weights = [tensor for _, weights in seen for tensor in weights.values()]
        runs.append([tensor.nan_to_num(7) for tensor in (*weights, *losses)])
    assert len(runs[0]) == len(runs[1])
    assert all(map(torch.equal, *runs))


def test_lbfgs_that_spoils_the_weights_between_two_calls(tmp_path):
    """An infinite learning rate: the next call of the closure meets weights that are NaN."""
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=float("inf"), max_iter=3)
    with Recorder(model, folder=tmp_path, loss=mean) as recorder:
        seen, _ = train(model, optimizer, batches(negative_at=1)[:1], recorder, explicit=False)
    dump = read_dump(recorder.written[0])
    assert dump.scalars["reason"] == "update"
    assert all(torch.equal(dump.state[name], tensor) for name, tensor in seen[0][1].items())
    assert nandoctor.replay(recorder.written[0], fixes=False).report.cause.code == "nonfinite-update"
