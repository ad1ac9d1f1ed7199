"""Loops that write weights without an optimizer, or change the model: the dump is of the step, and says what is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor import Recorder
from nandoctor.capture.async_flags import Flag
from nandoctor.dumps.reader import read_dump
from tests.capture.test_odd_loops import FAILING, Norm, loss_of, make_batches


def descend(model):
    """Gradient descent by hand, as tutorials have it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)
            parameter.grad.zero_()


def descend_through_data(model):
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.data - 0.01 * parameter.grad, None


def descend_in_data(model):
    """As torch's tutorial of a character RNN has it: no version is counted."""
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad.data, alpha=-0.01)
        parameter.grad.zero_()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("write", [descend, descend_through_data, descend_in_data])
@pytest.mark.parametrize("divides", [True, False], ids=["loss", "gradients"])
def test_a_descent_by_hand_keeps_clean_weights(tmp_path, monkeypatch, is_late, write, divides):
    if is_late:
        monkeypatch.setattr(Flag, "on_device", property(lambda _: True))  # as those of a device are
        monkeypatch.setattr(Flag, "ready", property(lambda _: False))
    torch.manual_seed(0)
    model = Norm(divides=divides)
    before = []
    with Recorder(model, folder=tmp_path, arguments={"divides": divides}, loss=loss_of) as recorder:
        for x, y in make_batches():
            before.append(copy.deepcopy(model.state_dict()))
            loss = loss_of(model(x), (x, y))
            recorder.watch(loss, (x, y))
            loss.backward()
            write(model)
    path = recorder.written[0]
    dump = read_dump(path)
    assert (path.name, dump.missing) == (f"nan-step{FAILING:06d}.pth", ())
    assert all(torch.equal(tensor, before[FAILING][name]) for name, tensor in dump.state.items())
    report = nandoctor.replay(path, fixes=False).report
    expected = "division-by-zero" if divides else "gradient-singularity"
    assert (report.reproduction.grade, report.cause.code) == ("exact", expected)


def test_a_descent_by_hand_of_a_model_that_changes_its_format(tmp_path, caplog):
    model = Norm(divides=True)
    with Recorder(model, folder=tmp_path, arguments={"divides": True}, loss=loss_of) as recorder:
        for number, (x, y) in enumerate(make_batches()):
            model.to(dtype := torch.float32 if number < 2 else torch.float64)
            loss = loss_of(model(x.to(dtype)), (x, y))
            recorder.watch(loss, (x, y))
            loss.backward()
            descend_in_data(model)
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.state["enter.weight"].dtype) == (FAILING, torch.float64)
    assert all(tensor.isfinite().all() for tensor in dump.state.values())
    assert "may miss steps" not in caplog.text


def test_a_perturbation_that_divides_by_zero_is_found(tmp_path, caplog):
    """Sharpness-aware minimization divides by the norm of the gradients, which a hinge loss makes 0."""
    torch.manual_seed(0)
    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, folder=tmp_path, loss=loss_of) as recorder:
        for number, (x, y) in enumerate(make_batches(failing=0)[1:]):
            for perturbs in (True, False):
                loss = loss_of(model(x), (x, y)) * (0 if number == 2 else 1)
                recorder.watch(loss, (x, y))
                loss.backward()
                if perturbs:
                    clean = [parameter.data.clone() for parameter in model.parameters()]
                    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
                    with torch.no_grad():
                        [parameter.add_(parameter.grad, alpha=0.05 / norm) for parameter in model.parameters()]
                else:
                    for parameter, data in zip(model.parameters(), clean, strict=True):
                        parameter.data = data
                    optimizer.step()
                optimizer.zero_grad()
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.scalars["reason"]) == (4, "update")
    assert all(tensor.isfinite().all() for tensor in dump.state.values())
    assert "the loss is finite, and the update by TrainingLoop left non-finite weights" in caplog.text


def test_weights_written_after_the_forward_are_told(tmp_path):
    model = Norm()
    with Recorder(model, folder=tmp_path, loss=loss_of) as recorder:
        for x, y in make_batches():
            recorder.watch(loss_of(model(x), (x, y)), (x, y))
            model.enter.weight.data = model.enter.weight.data * 2
            path = recorder.save()
            break
    told = ("the weights of the step: the loop has written others since its forward, without an optimizer",)
    assert read_dump(path).missing == told


def test_a_head_put_on_in_training_is_told(tmp_path, caplog):
    model = Norm(divides=True)
    recorder = Recorder(model, folder=tmp_path, arguments={"divides": True}, loss=loss_of)
    model.leave = nn.Linear(8, 3)
    x, y = make_batches()[FAILING]
    recorder.watch(loss_of(model(x), (x, y)), (x, y))
    recorder.close()
    assert "no longer those that training began with (leave.weight and leave.bias)" in caplog.text
    assert f"nandoctor replay {recorder.written[0]} --model FILE.py:NAME" in caplog.text


class Counts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("largest", torch.zeros(4, dtype=dtype))

    def forward(self, x):
        self.largest.copy_(x.amax(0))
        return self.layer(x.log())


def test_lazy_layers_that_got_their_shapes_are_no_others(tmp_path, caplog):
    model = nn.Sequential(nn.LazyLinear(3), nn.Flatten())
    with Recorder(model, folder=tmp_path, builder="model.py:make") as recorder:
        recorder.watch(model(torch.full((2, 4), torch.inf)))
    assert recorder.written
    assert "no longer those" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_buffers_of_another_format_than_autocast(tmp_path, caplog, dtype):
    """Autocast refuses to join fp16 under bf16, and the recorder missed every step."""
    model = Counts(dtype)
    with Recorder(model, folder=tmp_path, builder=lambda: Counts(dtype)) as recorder:
        for x in (torch.ones(2, 4), torch.full((2, 4), 2.0), torch.zeros(2, 4)):
            with torch.autocast("cpu", torch.bfloat16):
                recorder.watch(model(x).sum())
    assert "may miss steps" not in caplog.text
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.state["largest"].tolist()) == (2, [2.0] * 4)


class TwoFormats(nn.Module):
    """Computes in fp16 within a loop under bf16 autocast."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            hidden = self.layer(x)
        return hidden.float()


def test_fp16_within_bf16_autocast_is_replayed(tmp_path):
    model = TwoFormats()
    with Recorder(model, folder=tmp_path) as recorder:
        for x in (torch.ones(2, 4), torch.full((2, 4), 1e6)):
            with torch.autocast("cpu", torch.bfloat16):
                recorder.watch(model(x).sum())
    report = nandoctor.replay(recorder.written[0], fixes=False).report
    assert (report.reproduction.grade, report.cause.code) == ("exact", "input-cast-overflow")
