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


def make_flags_late(monkeypatch):
    """As those of a device are."""
    monkeypatch.setattr(Flag, "on_device", property(lambda _: True))
    monkeypatch.setattr(Flag, "ready", property(lambda _: False))


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    "write", [descend, pytest.param(descend_through_data, marks=pytest.mark.slow), descend_in_data]
)
@pytest.mark.parametrize("divides", [True, False], ids=["loss", "gradients"])
def test_a_descent_by_hand_keeps_clean_weights(tmp_path, monkeypatch, is_late, write, divides):
    if is_late:
        make_flags_late(monkeypatch)
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
    headline = nandoctor.replay(recorder.written[0], fixes=False).report.cause.headline
    assert headline.startswith("The training loop itself makes enter.weight")
    assert all(tensor.isfinite().all() for tensor in dump.state.values())
    assert "the loss is finite, but the update by the training loop itself left non-finite weights" in caplog.text


def test_the_first_write_of_a_loop_may_spoil(tmp_path):
    model = Norm()
    with Recorder(model, folder=tmp_path, loss=loss_of) as recorder:
        for x, y in make_batches()[:2]:
            recorder.watch(loss_of(model(x), (x, y)), (x, y))
            model.enter.weight.data.div_(0.0)
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.scalars["reason"]) == (0, "update")
    assert all(tensor.isfinite().all() for tensor in dump.state.values())


@pytest.mark.parametrize(("is_counted", "told"), [(True, 1), (False, 2)], ids=["itself", "data"])
def test_a_loop_is_not_taken_for_its_optimizer(tmp_path, is_counted, told):
    """The row of the table that it divides by zero is in no batch, so losses and gradients stay finite.

    Writes through `.data` are not counted, so that one is found after the next update.
    """
    model = nn.Embedding(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, folder=tmp_path, builder="model.py:make") as recorder:
        for number in range(4):
            loss = model(torch.tensor([1, 2])).square().sum()
            recorder.watch(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                (model.weight if is_counted else model.weight.data)[0].div_(number != 1)
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["reason"], dump.scalars["step"]) == ("update", told)
    headline = nandoctor.replay(recorder.written[0], model=nn.Embedding(4, 2), fixes=False).report.cause.headline
    assert headline == "The training loop itself makes weight non-finite"


def test_weights_written_after_the_forward_are_told(tmp_path):
    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, folder=tmp_path, loss=loss_of) as recorder:
        for x, y in make_batches()[:2]:
            loss = loss_of(model(x), (x, y))
            recorder.watch(loss, (x, y))
            loss.backward()
            optimizer.step()
        recorder.watch(loss_of(model(x), (x, y)), (x, y))
        model.enter.weight.data = model.enter.weight.data * 2
        path = recorder.save()
    told = ("the weights of the step: the loop has overwritten them since the forward, without an optimizer",)
    assert read_dump(path).missing == told


def test_a_head_put_on_in_training_is_told(tmp_path, caplog):
    model = Norm(divides=True)
    recorder = Recorder(model, folder=tmp_path, arguments={"divides": True}, loss=loss_of)
    model.leave = nn.Linear(8, 3)
    x, y = make_batches()[FAILING]
    recorder.watch(loss_of(model(x), (x, y)), (x, y))
    recorder.close()
    assert "have changed since training began (leave.weight and leave.bias)" in caplog.text
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


def fill_lazily(model):
    for place in (0, 2, 4):
        model[place] = nn.LazyLinear(model[place].out_features)


def replace_parameters(model):
    """Gradient descent by new parameters."""
    for layer in (model[0], model[2], model[4]):
        layer.weight = nn.Parameter((layer.weight - 0.01 * layer.weight.grad).detach())


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


def exchange_a_layer(model):
    descend_in_data(model)
    model[2] = nn.Linear(8, 8)


def replace_one(model):
    model[2].weight = nn.Parameter((model[2].weight - 0.01 * model[2].weight.grad).detach())


def insert_a_layer(model):
    """As a list of modules does it, with no word to torch."""
    descend_in_data(model)
    if len(model) == 5:
        model.insert(2, nn.Linear(8, 8))


WRITES = [descend, descend_in_data, replace_parameters, replace_one, exchange_a_layer, insert_a_layer]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("prepare", [freeze_the_ends, take_a_checkpoint, fill_lazily])
def test_weights_are_clean_whichever_the_loop_trains(tmp_path, prepare, write):
    model = make_net()
    if prepare is fill_lazily:
        prepare(model)
    recorder = Recorder(model, folder=tmp_path, builder="model.py:make")
    if prepare is not fill_lazily:
        prepare(model)

    def write_trained(model):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        write(model)

    before = train(model, recorder, failing=3, write=write_trained)
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.missing) == (3, ())
    assert all(torch.equal(tensor, before[name]) for name, tensor in dump.state.items())


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_weights_between_those_that_stay(tmp_path, monkeypatch, has_optimizer):
    monkeypatch.setattr("nandoctor.capture.trainers._MAX_QUIET", 2)
    make_flags_late(monkeypatch)
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01) if has_optimizer else None

    def write(model):
        if optimizer is None:
            model[2].weight.data.sub_(0.01 * model[2].weight.grad)
            model.zero_grad()
            return
        optimizer.step()
        given, old = optimizer.param_groups[0]["params"], model[2].weight
        replace_one(model)
        given[[parameter is old for parameter in given].index(True)] = model[2].weight

    before = train(model, Recorder(model, folder=tmp_path, builder="model.py:make"), failing=6, write=write)
    (path,) = tmp_path.iterdir()
    dump = read_dump(path)
    assert (dump.scalars["step"], dump.missing) == (6, ())
    assert all(torch.equal(tensor, before[name]) for name, tensor in dump.state.items())


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
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_parameters_without_values_to_measure(tmp_path, caplog, part, has_optimizer):
    model = Parts(copy.deepcopy(part))
    given = [p for p in model.parameters() if not nn.parameter.is_lazy(p) and not p.is_meta]
    optimizer = torch.optim.SGD(given, 0.01)
    recorder = Recorder(model, folder=tmp_path, builder="model.py:make")
    write = (lambda _: optimizer.step()) if has_optimizer else (lambda _: None)
    before = train(model, recorder, failing=2, write=write)
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["reason"], recorder.history.num_steps) == ("loss", 3)
    assert torch.equal(dump.state["layer.weight"], before["layer.weight"])
    assert "may miss steps" not in caplog.text


def test_weights_that_are_loaded_once_are_copied_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("nandoctor.capture.trainers._MAX_QUIET", 4)
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    copies = []
    with Recorder(model, folder=tmp_path, builder="model.py:make") as recorder:
        for number in range(12):
            loss = model(torch.ones(2, 4)).square().sum()
            recorder.watch(loss)
            copies.append(recorder._tracker.current.weights is not None)
            if number == 0:
                model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
                continue
            loss.backward()
            optimizer.step()
    assert (copies[1], copies[-1]) == (True, False)


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
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in dump.state.items())


def test_a_model_that_is_moved_after_its_recorder_was_made(tmp_path, caplog):
    with torch.device("meta"):
        model = make_net()
    recorder = Recorder(model, folder=tmp_path, builder="model.py:make")
    model.to_empty(device="cpu")
    list(map(nn.init.ones_, model.parameters()))
    before = train(model, recorder, failing=2, write=descend)
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.missing) == (2, ())
    assert all(torch.equal(tensor, before[name]) for name, tensor in dump.state.items())
    assert "may miss steps" not in caplog.text
