"""Loops that mark the forward alone: the backward pass, the update or an error come after the block."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nandoctor
from nandoctor import Recorder
from nandoctor.dumps.reader import read_dump
from tests.capture.test_odd_loops import NUM_STEPS, Norm, loss_of, make_batches

FAILING = 3


class Root(nn.Module):
    """Its output is finite at 0, and its gradient is not."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return (self.leave(self.enter(x)) * x.abs().sum()).abs().sqrt()


def batches(failing=FAILING):
    return [torch.zeros(2, 4) if number == failing else torch.ones(2, 4) for number in range(6)]


def forward(recorder, model, x):
    with recorder.step(x):
        loss = model(x).mean()
        recorder.watch(loss)
    return loss


def micro_batches(recorder, model):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for number, x in enumerate(batches()):
        forward(recorder, model, x).backward()
        if number == 5:
            optimizer.step()


def an_assertion(recorder, model):
    for x in batches():
        forward(recorder, model, x).backward()
        assert model.leave.weight.grad.isfinite().all()
        torch.optim.SGD(model.parameters(), 1e-3).step()
        model.zero_grad()


def in_a_closure(recorder, model):
    optimizer = torch.optim.LBFGS(model.parameters(), 1e-3, max_iter=3)
    for number, x in enumerate(batches(failing=None)):
        optimizer.param_groups[0]["lr"] = float("inf") if number == FAILING else 1e-3

        def closure(x=x):
            optimizer.zero_grad()
            loss = forward(recorder, model, x)
            loss.backward()
            return loss

        optimizer.step(closure)


def one_of_two_optimizers(recorder, model):
    inside, outside = (torch.optim.SGD(part.parameters(), 1e-3) for part in (model.enter, model.leave))
    for number, x in enumerate(batches(failing=None)):
        outside.param_groups[0]["lr"] = float("inf") if number == FAILING else 1e-3
        with recorder.step(x):
            loss = model(x).mean()
            recorder.watch(loss)
            loss.backward()
            inside.step()
        outside.step()
        model.zero_grad()


@pytest.mark.parametrize(
    ("loop", "name", "reason"),
    [
        (micro_batches, "nan-step000000-micro3.pth", "gradients"),
        (an_assertion, "nan-step000003.pth", "gradients"),
        (in_a_closure, "nan-step000003.pth", "update"),
        (one_of_two_optimizers, "nan-step000003.pth", "update"),
    ],
)
def test_what_follows_the_block_is_its_step_s(tmp_path, loop, name, reason):
    torch.manual_seed(0)
    model = Root()
    with suppress(AssertionError), Recorder(model, folder=tmp_path) as recorder:
        loop(recorder, model)
    dump = read_dump(recorder.written[0])
    assert (recorder.written[0].name, dump.scalars["reason"]) == (name, reason)
    assert all(tensor.isfinite().all() for tensor in dump.state.values())


@pytest.mark.parametrize("marked", [True, False])
def test_a_skip_of_the_scaler_before_an_error_is_no_failure(tmp_path, marked):
    """It is how the scaler finds its scale; the error, of the data, has nothing to do with it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with suppress(FileNotFoundError), Recorder(model, folder=tmp_path, scaler=scaler) as recorder:
        if marked:
            recorder.begin()
        loss = model(torch.full((2, 4), 1e9)).sum()
        recorder.watch(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if marked:
            recorder.end()
        raise FileNotFoundError
    assert recorder.written == ()


def test_a_forward_computed_again_in_the_backward_is_no_step(tmp_path):
    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, folder=tmp_path, loss=loss_of) as recorder:
        for x, y in make_batches():
            loss = loss_of(checkpoint(model, x, use_reentrant=False), (x, y))
            recorder.watch(loss, (x, y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (recorder.next_step, recorder.written[0].name) == (NUM_STEPS, f"nan-step{FAILING:06d}.pth")
    report = nandoctor.replay(recorder.written[0], fixes=False).report
    assert (report.reproduction.grade, report.cause.code) == ("exact", "gradient-singularity")
