"""Loops that write weights without an optimizer, or change the model: what is not proved to be the step's is told."""

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


def make_flags_late(monkeypatch):
    """As those of a device are."""
    monkeypatch.setattr(Flag, "on_device", property(lambda _: True))
    monkeypatch.setattr(Flag, "ready", property(lambda _: False))


def train_by_hand(folder, write, *, divides):
    """Norm is trained by hand; a step's loss fails if it `divides`, else its gradients do."""
    torch.manual_seed(0)
    model, before = Norm(divides=divides), []
    with Recorder(model, folder=folder, arguments={"divides": divides}, loss=loss_of) as recorder:
        for x, y in make_batches():
            before.append(copy.deepcopy(model.state_dict()))
            loss = loss_of(model(x), (x, y))
            recorder.watch(loss, (x, y))
            loss.backward()
            write(model)
    return recorder.written[0], before[FAILING]


@pytest.mark.parametrize("write", [descend, descend_through_data, descend_in_data])
def test_a_loss_that_fails_is_saved_with_clean_weights(tmp_path, write):
    path, before = train_by_hand(tmp_path, write, divides=True)
    dump = read_dump(path)
    assert dump.missing == ()
    assert all(torch.equal(tensor, before[name]) for name, tensor in dump.state.items())
    report = nandoctor.replay(path, fixes=False).report
    assert (report.reproduction.grade, report.cause.code) == ("exact", "division-by-zero")


@pytest.mark.parametrize("write", [descend, descend_through_data])
def test_gradients_that_fail_are_found_by_the_next_forward(tmp_path, caplog, write):
    path, _ = train_by_hand(tmp_path, write, divides=False)
    scalars = read_dump(path).scalars  # without updates of an optimizer, gradients that are left accumulate
    assert max(scalars["step"], scalars["micro_batch"]) == FAILING + 1
    assert nandoctor.replay(path, fixes=False).report.cause.code == "poisoned-weights"


def test_the_step_of_perturbed_weights_is_told(tmp_path, caplog):
    """Its weights are put back before the optimizer's update."""
    torch.manual_seed(0)
    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, folder=tmp_path, loss=loss_of) as recorder:
        for number, (x, y) in enumerate(make_batches(failing=0)[1:]):
            for perturbs in (True, False):
                loss = loss_of(model(x), (x, y))
                recorder.watch(loss, (x, y))
                (loss * (torch.inf if number == 2 and not perturbs else 1)).backward()
                if perturbs:
                    clean = [parameter.detach().clone() for parameter in model.parameters()]
                    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
                    with torch.no_grad():
                        [parameter.add_(parameter.grad, alpha=0.05 / norm) for parameter in model.parameters()]
                else:
                    with torch.no_grad():
                        [parameter.copy_(data) for parameter, data in zip(model.parameters(), clean, strict=True)]
                    optimizer.step()
                optimizer.zero_grad()
    told = "the weights of the step: the loop has overwritten them since the forward, without an optimizer"
    assert told in read_dump(recorder.written[0]).missing
    assert caplog.text.count("A replay may not be of the step that failed") == 1


class Counts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("largest", torch.zeros(4, dtype=dtype))

    def forward(self, x):
        self.largest.copy_(x.amax(0))
        return self.layer(x.log())


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
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([1.0, -1.0, 1.0, -0.95]))  # in fp32 fp16 would hold the result
    with Recorder(model, folder=tmp_path) as recorder:
        for x in (torch.ones(2, 4), torch.full((2, 4), 1e6)):
            with torch.autocast("cpu", torch.bfloat16):
                recorder.watch(model(x).sum())
    report = nandoctor.replay(recorder.written[0], fixes=False).report
    assert (report.reproduction.grade, report.cause.code) == ("exact", "input-cast-overflow")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def freeze_the_ends(model):
    """As an adapter is trained between frozen layers."""
    for layer in (model[0], model[4]):
        layer.requires_grad_(False)


def take_a_checkpoint(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def train(model, recorder, *, failing, write):
    """Train by hand; the weights before the failing step, whose input is infinite."""
    for number in range(failing + 1):
        before = copy.deepcopy(model.state_dict())
        loss = model(torch.full((2, 4), torch.inf if number == failing else number + 1.0)).square().sum()
        recorder.watch(loss)
        loss.backward()
        write(model)
    recorder.close()
    return before


def test_weights_that_were_non_finite_were_not_written(tmp_path):
    model = make_net()
    nn.init.constant_(model[4].bias, torch.nan)
    recorder = Recorder(model, folder=tmp_path, builder="model.py:make")
    recorder.watch(model(torch.ones(2, 4)).sum())
    recorder.close()
    assert read_dump(recorder.written[0]).missing == ()


class Parts(nn.Module):
    """A layer, beside parts that its forward leaves alone."""

    def __init__(self, part):
        super().__init__()
        self.part, self.layer = part, nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


def hold(parameter):
    part = nn.Module()
    part.held = nn.Parameter(parameter, requires_grad=False)
    part.register_buffer("kept", parameter.clone())
    return part


@pytest.mark.parametrize(
    "part",
    [nn.LazyLinear(3), hold(torch.zeros(4).to(torch.float8_e4m3fn)), hold(torch.empty(4, device="meta"))],
    ids=["lazy", "fp8", "meta"],
)
def test_parameters_without_values_to_measure(tmp_path, caplog, part):
    model = Parts(copy.deepcopy(part))
    given = [p for p in model.parameters() if not nn.parameter.is_lazy(p) and not p.is_meta]
    optimizer = torch.optim.SGD(given, 0.01)
    recorder = Recorder(model, folder=tmp_path, builder="model.py:make")
    before = train(model, recorder, failing=2, write=lambda _: optimizer.step())
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["reason"], recorder.history.num_steps) == ("loss", 3)
    assert torch.equal(dump.state["layer.weight"], before["layer.weight"])
    assert "may miss steps" not in caplog.text


class Rooted(nn.Module):
    """Finite at zero, where its gradients are not; beside it a target that the loop makes an average of it."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x):
        return (self.online(x) * x.abs().sum()).abs().sqrt() - 0 * self.target(x)


def average(target, online):
    target.data.mul_(0.9).add_(online.data, alpha=0.1)


def average_anew(target, online):
    target.data = target.data * 0.9 + online.data * 0.1


def take_step(model, optimizer, recorder, *, fails):
    """A step whose gradients are non-finite where it fails."""
    loss = model(torch.full((2, 4), float(not fails))).sum()
    recorder.watch(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("write", [average, average_anew])
def test_a_frozen_target_is_as_it_was_before(tmp_path, monkeypatch, write):
    make_flags_late(monkeypatch)
    model, before = Rooted(), []
    with Recorder(model, folder=tmp_path) as recorder:
        take_a_checkpoint(model.online)  # after the recorder was made
        optimizer = torch.optim.SGD(model.online.parameters(), 0.01)
        for number in range(4):
            before.append(copy.deepcopy(model.state_dict()))
            take_step(model, optimizer, recorder, fails=number == 2)
            list(map(write, model.target.parameters(), model.online.parameters()))
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.scalars["reason"], dump.missing) == (2, "gradients", ())
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in dump.state.items())


def add_head(optimizer, model):
    optimizer.add_param_group({"params": list(model.online.parameters())})


def replace_in_group(optimizer, model):
    """As splats are, when some are pruned."""
    optimizer.param_groups[0]["params"] = list(model.online.parameters())


@pytest.mark.parametrize("give", [add_head, replace_in_group])
def test_a_head_that_the_optimizer_is_given_is_kept(tmp_path, monkeypatch, give):
    make_flags_late(monkeypatch)
    model, before = Rooted(), []
    optimizer = torch.optim.SGD(model.online.parameters(), 0.01)
    with Recorder(model, folder=tmp_path) as recorder:
        for number in range(4):
            if number == 1:
                model.online = nn.Linear(4, 1)
                give(optimizer, model)
            before.append(copy.deepcopy(model.state_dict()))
            take_step(model, optimizer, recorder, fails=number == 2)
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.scalars["reason"]) == (2, "gradients")
    assert dump.missing == ("the modules of the step: some were added or taken out after the recorder was made",)
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in dump.state.items())


def test_a_model_that_is_moved_after_its_recorder_was_made(tmp_path, caplog):
    with torch.device("meta"):
        model = make_net()
    recorder = Recorder(model, folder=tmp_path, builder="model.py:make")
    model.to_empty(device="cpu")
    list(map(nn.init.ones_, model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    before = train(model, recorder, failing=2, write=lambda _: optimizer.step())
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.missing) == (2, ())
    assert all(torch.equal(tensor, before[name]) for name, tensor in dump.state.items())
    assert "may miss steps" not in caplog.text
