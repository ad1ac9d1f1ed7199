"""Loops that write weights without an optimizer, or change the model: what is not proved to be the step's is told."""

import copy

import pytest
import torch
from loops import LR, Run
from torch import nn

import nandoctor
from nandoctor import Recorder
from nandoctor.capture.tensors import Flag
from nandoctor.dumps.reader import read_dump


def descend(model):
    """Gradient descent by hand, as tutorials have it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=LR)
            parameter.grad.zero_()


def descend_through_data(model):
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.data - LR * parameter.grad, None


def descend_in_data(model):
    """As torch's tutorial of a character RNN has it: no version is counted."""
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad.data, alpha=-LR)
        parameter.grad.zero_()


def train_by_hand(run, write):
    for _, batch in run:
        run.loss(batch).backward()
        write(run.net)
    run.recorder.close()
    return run.recorder.written[0]


@pytest.mark.parametrize("write", [descend, descend_through_data, descend_in_data])
def test_a_loss_that_fails_is_saved_with_clean_weights(tmp_path, write):
    run = Run(what="loss", folder=tmp_path)
    path = train_by_hand(run, write)
    dump = read_dump(path)
    assert dump.missing == ()
    assert all(torch.equal(tensor, run.states[run.failing][name]) for name, tensor in dump.state.items())


@pytest.mark.parametrize("write", [descend, descend_through_data])
def test_gradients_that_fail_are_found_by_the_next_forward(tmp_path, write):
    run = Run(what="gradients", folder=tmp_path)
    path = train_by_hand(run, write)
    scalars = read_dump(path).scalars  # without updates of an optimizer, gradients that are left accumulate
    assert max(scalars["step"], scalars["micro_batch"]) == run.failing + 1
    assert nandoctor.replay(path, fixes=False).report.cause.code == "poisoned-weights"


def test_the_step_of_perturbed_weights_is_told(tmp_path, caplog):
    """Sharpness-aware: the weights are put back before the optimizer's update."""
    run = Run(folder=tmp_path)
    for number, batch in run:
        run.loss(batch).backward()
        clean = copy.deepcopy(run.net.state_dict())
        with torch.no_grad():
            [parameter.add_(parameter.grad, alpha=0.05) for parameter in run.net.parameters()]
        run.optimizer.zero_grad()
        (run.loss(batch) * (torch.inf if number == 2 else 1)).backward()
        run.net.load_state_dict(clean)
        run.update(number)
    told = "the weights of the step: the loop has overwritten them since the forward, without an optimizer"
    assert told in read_dump(run.recorder.written[0]).missing
    assert caplog.text.count("A replay may not be of the step that failed") == 1


class Rooted(nn.Module):
    """Finite at zero, where its gradients are not; beside it a target that the loop makes an average of it."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x):
        return (self.online(x) * x.abs().sum()).abs().sqrt() - 0 * self.target(x)


def make_on_meta():
    with torch.device("meta"):
        return Rooted()


def average(model, _):
    for target, online in zip(model.target.parameters(), model.online.parameters(), strict=True):
        target.data.mul_(0.9).add_(online.data, alpha=0.1)


def average_anew(model, _):
    for target, online in zip(model.target.parameters(), model.online.parameters(), strict=True):
        target.data = target.data * 0.9 + online.data * 0.1


def add_head(model, optimizer):
    model.online = nn.Linear(4, 1)
    optimizer.add_param_group({"params": list(model.online.parameters())})


def replace_in_group(model, optimizer):
    """As splats are, when some are pruned."""
    model.online.weight = nn.Parameter(model.online.weight * 2)
    optimizer.param_groups[0]["params"] = list(model.online.parameters())


def go_on(model, optimizer):
    """Nothing but the updates changes the weights."""


TOLD = ("the modules of the step: some were added or taken out after the recorder was made",)


@pytest.mark.parametrize(
    ("make", "change", "missing"),
    [
        (Rooted, average, ()),
        (Rooted, average_anew, ()),
        (Rooted, add_head, TOLD),
        (Rooted, replace_in_group, ()),
        (make_on_meta, go_on, ()),
    ],
)
def test_the_weights_are_those_of_the_step(tmp_path, monkeypatch, caplog, make, change, missing):
    """Flags arrive late, as those of a device do; each step ends with what the loop changes beside its update."""
    monkeypatch.setattr(Flag, "on_device", property(lambda _: True))
    monkeypatch.setattr(Flag, "ready", property(lambda _: False))
    model, before = make(), []
    with Recorder(model, folder=tmp_path) as recorder:
        if make is make_on_meta:
            model.to_empty(device="cpu")
            list(map(nn.init.ones_, model.parameters()))
        optimizer = torch.optim.SGD(model.online.parameters(), LR)
        for number in range(4):
            before.append(copy.deepcopy(model.state_dict()))
            loss = model(torch.full((2, 4), float(number != 2))).sum()
            recorder.watch(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0 or change in (average, average_anew):
                change(model, optimizer)
    dump = read_dump(recorder.written[0])
    assert (dump.scalars["step"], dump.scalars["reason"], dump.missing) == (2, "gradients", missing)
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in dump.state.items())
    assert "may miss steps" not in caplog.text
