"""Every run starts from the state that the dump has, whatever the forward of the run before it wrote to."""

import hashlib
import random
from collections import OrderedDict, deque
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nandoctor
from nandoctor.dumps.reader import read_dump
from nandoctor.engine import module_state
from nandoctor.engine.module_state import find_outside, restored, run_backward

X = torch.linspace(-1, 1, 12).reshape(3, 4)
SHARED = {"seen": 0}


class Writes(nn.Module):
    """Does something to its state by `write`, and shows all of it in its output."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.linear = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.ones(2, 4))
        self.register_buffer("mean", torch.ones(4))
        self.plain, self.wide = torch.ones(4), torch.ones(1).expand(4)
        self.steps, self.cache, self.tables = [], {}, {"a": torch.ones(4)}
        self.rng, self.dice, self.numbers = torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)
        self.unregistered = [nn.Linear(4, 4)]

    def forward(self, x):
        with torch.no_grad():
            extra = self.write(self)
        shown = sum(tensor.sum() for tensor in (*self.parameters(), self.mean, self.plain, self.wide))
        numbers = len(self.steps) + len(self.cache)
        hidden = self.tables["a"].sum() + self.unregistered[0].weight.sum()
        return self.linear(x) + shown + numbers + hidden + (0.0 if extra is None else extra)


def build_late(model):
    if not hasattr(model, "late"):
        model.late = nn.Linear(4, 4)
    return model.late.weight.sum()


def remember(model):
    return model.cache.setdefault("made", torch.rand(4)).sum()


WRITES = {
    "parameter": lambda model: model.codes.mul_(0.5).new_zeros(()),
    "data of a parameter": lambda model: model.linear.weight.data.mul_(2).new_zeros(()),
    "replaced data": lambda model: setattr(model.codes, "data", model.codes.data * 2),
    "replaced parameter": lambda model: setattr(model, "codes", nn.Parameter(model.codes * 2)),
    "through numpy": lambda model: model.codes.detach().numpy().__imul__(2) is None,
    "buffer": lambda model: model.mean.add_(1).new_zeros(()),
    "replaced buffer": lambda model: setattr(model, "mean", model.mean + 1),
    "plain tensor": lambda model: model.plain.add_(1).new_zeros(()),
    "tensor of a dict": lambda model: model.tables["a"].add_(1).new_zeros(()),
    "list": lambda model: model.steps.append(1),
    "unregistered module": lambda model: model.unregistered[0].weight.mul_(3).new_zeros(()),
    "cached tensor": remember,
    "built in the forward": build_late,
    "own generator": lambda model: torch.rand(1, generator=model.rng),
    "own dice": lambda model: model.dice.random(),
    "numpy's generator": lambda model: model.numbers.random(),
    "frozen": lambda model: model.codes.requires_grad_(not model.codes.requires_grad).requires_grad * 1.0,
}


def watch_writes(monkeypatch):
    """Copy nothing before the run, as with a large model."""
    monkeypatch.setattr(module_state, "_WATCHED_NBYTES", 0)
    monkeypatch.setattr(module_state, "_SMALL_NBYTES", 0)


def run(model, seed, context):
    torch.manual_seed(seed)
    with context(model):
        return model(X).clone()


def differs_after_another(make, context):
    """Whether a run shows that there was another, with another seed, before it."""
    alone, second = run(make(), 0, context), make()
    run(second, 1, context)
    return not torch.equal(alone, run(second, 0, context))


@pytest.mark.parametrize("copies", ["before the run", "before the write"])
@pytest.mark.parametrize("kind", WRITES)
def test_a_second_run_starts_as_the_first(kind, copies, monkeypatch):
    if copies == "before the write":
        watch_writes(monkeypatch)
        if kind == "through numpy":
            pytest.skip("writes past torch to memory of 32 MB and more are not seen")
    assert not differs_after_another(lambda: Writes(WRITES[kind]), restored)


def test_without_it_every_one_of_these_writes_shows():
    kinds = [kind for kind, write in WRITES.items() if not differs_after_another(lambda: Writes(write), nullcontext)]  # noqa: B023
    assert kinds == []


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        self.codes.data.mul_(300)
        return torch.matmul(x.half().float(), torch.diag(self.codes))


@pytest.mark.parametrize("watched", [True, False], ids=["mapped", "copied"])
def test_codes_do_not_grow_from_run_to_run(watched, tmp_path, monkeypatch):
    """Otherwise the fp32 run beside the first would start from 300 times the saved codes."""
    if watched:
        watch_writes(monkeypatch)
    path = tmp_path / "dump.pth"
    torch.save({"state_dict": Codebook().state_dict(), "x": X, "out": Codebook()(X)}, path)
    digest = hashlib.sha256(path.read_bytes()).digest()
    dump = read_dump(path)
    case = nandoctor.replay(dump, Codebook, mode="train", fixes=False)
    runs = case.report.runs
    assert runs.fp32.output[0].absmax == runs.autocast.output[0].absmax == 300
    assert case.report.reproduction.grade == "exact"
    assert not any("could not be traced" in note for note in case.report.notes)
    assert torch.equal(dump.state["codes"], torch.ones(4))
    assert hashlib.sha256(path.read_bytes()).digest() == digest


class WritesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, write):
        ctx.write = write
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.write()
        return gradient, None


def in_checkpoint(x, write):
    def block(x):
        write()
        return x * x

    return checkpoint(block, x, use_reentrant=False)


BACKWARD_WRITES = {
    "tensor hook": lambda x, write: (x.register_hook(lambda _: write()), x)[1],
    "node hook": lambda x, write: (x.grad_fn.register_prehook(lambda _: write()), x)[1],
    "function": WritesBackward.apply,
    "checkpoint": in_checkpoint,
}


@pytest.mark.parametrize("kind", BACKWARD_WRITES)
def test_what_a_backward_pass_writes_is_put_back(kind, monkeypatch):
    """Torch's own kernels are not watched there, but whatever code in Python they come to is."""
    watch_writes(monkeypatch)
    model, before = nn.Linear(4, 4), []
    model.weight.data.fill_(1.0)
    with restored(model):
        output = BACKWARD_WRITES[kind](model(X), lambda: before.append(model.weight.data.mul_(3)))
        weights = dict(model.named_parameters())
        run_backward(weights, output.sum(), loss_scale=2.0, keep=True, ends_early=False, large=False)
        assert before
        assert not torch.equal(model.weight, torch.ones(4, 4))
    assert torch.equal(model.weight, torch.ones(4, 4))


def test_weights_of_a_loss_hide_none_of_the_same_name():
    model, head = nn.Linear(4, 4), nn.Linear(4, 4)
    outside = find_outside(head(model(X)).sum(), model, {"": head})
    assert {*map(id, outside.values())} == {id(head.weight), id(head.bias)}
    assert not outside.keys() & dict(model.named_parameters()).keys()


def test_hooks_attributes_and_containers_are_as_they_were():
    layer = nn.Linear(2, 2)
    layer.table, layer.last = OrderedDict(a=1, b=2), deque([1, 2])
    layer.table.move_to_end("a")
    with restored(nn.Sequential(layer)):
        layer.register_forward_pre_hook(print)
        layer.eps = 1.0
        layer.table.move_to_end("b")
        layer.last.append(3)
    assert not layer._forward_pre_hooks
    assert not hasattr(layer, "eps")
    assert (list(layer.table), list(layer.last)) == (["b", "a"], [1, 2])


class Counted(nn.Linear):
    def forward(self, x):
        SHARED["seen"] += 1
        return {"logit": super().forward(x) * 1e9, "calls": torch.tensor(float(SHARED["seen"]))}


def test_state_that_runs_do_not_put_back_is_said_after_a_search(replay):
    report = replay(Counted(4, 4), {"x": X}, max_trials=30)
    assert any("gave another output in the search" in note for note in report.search_notes)


class Gain(nn.Linear):
    """Leaves a number for the next step, and returns the very buffer that has it."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            level = x.abs().mean()
            self.gain.copy_((1 - torch.exp(-2 * level)) / level)
        return super().forward(x), self.gain


@pytest.mark.slow
def test_a_buffer_that_is_returned_is_read_before_it_is_put_back(replay):
    fixes = replay(Gain, {"x": torch.zeros(3, 4)}).fixes
    assert next(fix.title for fix in fixes if fix.verified).startswith("Give div the value 2 and no gradient")
    workarounds = [fix.workaround for fix in fixes if fix.workaround]
    assert all("where the formula tends to 2" in told for told in workarounds)


class Centred:
    """A loss with a state, which is no module: the directions of rows of zeros are NaN."""

    def __init__(self):
        self.num_steps, self.center = 0, torch.zeros(4)

    def __call__(self, output, batch):
        self.num_steps += 1
        rows = output.detach()
        self.center = 0.9 * self.center + 0.1 * (rows / rows.norm(dim=1, keepdim=True)).mean(0)
        return output.mean() * min(self.num_steps, 5)


@pytest.mark.parametrize("is_read", [True, False])
def test_state_of_a_loss_that_is_no_module_is_put_back(is_read, replay):
    criterion = Centred()

    def reading(output, batch):
        return criterion(output, batch)

    loss = reading if is_read else criterion
    model = nn.Linear(4, 4, bias=False)
    report = replay(model, {"x": X}, loss=loss)
    assert (criterion.num_steps, bool(criterion.center.any())) == (0, False)
    assert report.verdict == "healthy"
    report = replay(model, {"x": torch.zeros(2, 4)}, loss=loss)
    assert (report.verdict, criterion.center.isnan().any()) == ("cannot-tell", False)
    assert "loss>" in report.headline
