"""The step that is saved is the one that caused the damage, wherever in the step it was done: gradients or update."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor import Recorder
from nandoctor.capture.async_flags import Flag
from nandoctor.dumps.reader import read_dump

HERE = Path(__file__).parent


class Root(nn.Module):
    """The root of a sum that one batch makes zero: finite, with an infinite gradient that meets a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 1)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.lift.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.lift(x)
        length = hidden.square().sum(dim=1, keepdim=True).sqrt()
        return self.head(self.norm(x + hidden)) + length


class Words(nn.Module):
    """A mean of word vectors; words that no batch has get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words).mean(dim=1))


def squared(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def make(kind):
    torch.manual_seed(0)
    return kind()


def batches(*, zero_at=None, number=6):
    torch.manual_seed(1)
    given = [torch.randn(6, 4) for _ in range(number)]
    if zero_at is not None:
        given[zero_at][2] = 0
    return given


def run(model, optimizer, given, recorder=None, *, before=None):
    """A plain loop; returns the weights before each step, and the losses."""
    weights, losses = [], []
    for number, batch in enumerate(given):
        if before is not None:
            before(number, optimizer)
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        loss = squared(model(batch), batch)
        if recorder is not None:
            recorder.watch(loss, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return weights, losses


def equal(left, right):
    """The same bits, NaN included."""
    return left.keys() == right.keys() and all(torch.equal(left[n].nan_to_num(7), right[n].nan_to_num(7)) for n in left)


@pytest.fixture(params=["at once", "late", "late, no copy"])
def timing(request, monkeypatch):
    """How flags arrive: on a CPU at once, from a device late; and without room for a copy of the weights."""
    if request.param != "at once":
        monkeypatch.setattr(Flag, "on_device", property(lambda _: True))
    return {"undo_nbytes": 0} if "no copy" in request.param else {}


@pytest.fixture(autouse=True)
def _in_the_folder_of_this_file(monkeypatch):
    monkeypatch.chdir(HERE)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_a_nan_gradient_of_a_finite_loss(tmp_path, timing):
    model, given = make(Root), batches(zero_at=3)
    with Recorder(model, folder=tmp_path, loss=squared, **timing) as recorder:
        weights, losses = run(model, sgd(model), given, recorder)
    assert losses[3].isfinite()
    (path,) = recorder.written
    dump = read_dump(path)
    assert (path.name, dump.scalars["reason"], dump.missing) == ("nan-step000003.pth", "gradients", ())
    assert equal(dump.state, weights[3])

    report = nandoctor.replay(path, fixes=False).report
    assert report.reproduction.grade == "exact"
    assert (report.origin.phase, report.cause.code) == ("backward", "gradient-singularity")
    assert report.origin.op == "sqrt"


class UnprintableError(AssertionError):
    """An error that raises another where it is read."""

    def __str__(self):
        raise ValueError


def insist(model):
    """What loops do that would rather die than train on."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not norm.isfinite():
        raise UnprintableError


@pytest.mark.parametrize("watched", ["with", "step", "exit"])
@pytest.mark.parametrize("way", ["assertion", "clipping", "anomaly"])
def test_a_loop_that_dies_of_its_gradients(tmp_path, monkeypatch, way, watched):
    model = make(Root)
    optimizer = sgd(model)
    recorder = Recorder(model, folder=tmp_path, loss=squared)
    checks = {"assertion": insist, "clipping": partial(nn.utils.clip_grad_norm_, max_norm=1, error_if_nonfinite=True)}

    def train():
        with recorder if watched == "with" else nullcontext(), torch.autograd.set_detect_anomaly(way == "anomaly"):
            for batch in batches(zero_at=3):
                with recorder.step(batch) if watched == "step" else nullcontext():
                    loss = squared(model(batch), batch)
                    recorder.watch(loss, batch)
                    optimizer.zero_grad()
                    loss.backward()
                    check = checks.get(way, id)
                    check(model if way == "assertion" else model.parameters())
                    optimizer.step()

    with pytest.raises((AssertionError, RuntimeError)) as caught, warnings.catch_warnings(action="ignore"):
        train()
    if watched == "exit":
        monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
        recorder._at_exit()
    recorder.close()
    dump = read_dump(recorder.written[0])
    assert (dump.path.name, dump.scalars["reason"]) == ("nan-step000003.pth", "gradients")


class Raising(nn.Module):
    def __init__(self, check="logits"):
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)
        self.check = check

    def forward(self, x):
        logits = self.linear(x)
        if self.check == "name":
            raise ValueError("norm must be one of 'inf', 'l2'")
        if self.check == "key":
            return {}["nan"]
        if self.check == "temporary":
            return torch.multinomial(logits / logits.norm(), 1)
        if self.check == "filled":
            return torch.full((3,), float("inf")).minimum(logits) @ torch.ones(2)
        ratios = logits / logits.norm(dim=1, keepdim=True)
        assert self.check != "bare" or ratios.isfinite().all()
        return torch.distributions.Categorical(logits=ratios).probs


@pytest.mark.parametrize(
    ("check", "saved"),
    [("logits", True), ("bare", True), ("temporary", True), ("name", False), ("key", False), ("filled", False)],
)
def test_a_forward_that_raises_for_its_own_nan(tmp_path, caplog, check, saved):
    """What its variables hold of the weights' products tells, not a word in the message alone."""
    model, batch = Raising(check), torch.zeros(2, 4)
    recorder = Recorder(model, folder=tmp_path)
    with pytest.raises((ValueError, KeyError, AssertionError, RuntimeError)), recorder, recorder.step(batch):
        model(batch)
    assert len(recorder.written) == saved
    assert ("the forward raised an error, and a value in it is non-finite" in caplog.text) == saved
    for path in recorder.written:
        report = nandoctor.replay(path, model=partial(Raising, check), fixes=False).report
        assert (report.origin.phase, report.origin.op) == ("forward", "div")


def test_an_error_after_a_forward_that_raised_is_not_its(tmp_path):
    model = nn.Linear(4, 3)
    recorder = Recorder(model, folder=tmp_path)
    with pytest.raises(ValueError, match="nan"), recorder:  # noqa: PT012
        with suppress(RuntimeError):
            model(torch.ones(2, 5))
        float("nan.png")
    assert not recorder.written


def test_the_error_of_another_cell_is_none_of_the_training(tmp_path, monkeypatch):
    model = make(Root)
    recorder = Recorder(model, folder=tmp_path, loss=squared)
    recorder.watch(squared(model(batches()[0]), None))
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(sys, "last_value", RuntimeError("'Sqrt' returned nan values in its 0th output"), raising=False)
    recorder._at_exit()
    assert recorder.written == ()


def test_a_loop_that_is_stopped_while_the_scaler_searches(tmp_path):
    model = make(Root)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    recorder = Recorder(model, folder=tmp_path, loss=squared, scaler=scaler)

    def train():
        with recorder:
            recorder.watch(loss := squared(model(1e3 * batches()[0]), None))
            scaler.scale(loss).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert not model.head.weight.grad.isfinite().all()
    assert recorder.written == ()


def test_a_scaler_that_skips_one_of_two_optimizers(tmp_path):
    model = make(Root)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.lift, model.head)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Recorder(model, folder=tmp_path, loss=squared, scaler=scaler) as recorder:
        for batch in batches(zero_at=1, number=2):
            recorder.watch(loss := squared(model(batch), batch), batch)
            scaler.scale(loss).backward()
            list(map(scaler.unscale_, optimizers))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by NaN, those that were finite too
            list(map(scaler.step, optimizers))
            scaler.update()
            model.zero_grad()
    assert read_dump(recorder.written[-1]).scalars["reason"] == "gradients"


def test_training_is_bit_identical_with_the_recorder_on(tmp_path, timing):
    states = []
    for folder in (None, tmp_path):
        model = make(Root)
        recorder = Recorder(model, folder=folder, loss=squared, **timing) if folder else None
        weights, losses = run(model, torch.optim.AdamW(model.parameters()), batches(zero_at=3), recorder)
        states.append((weights, torch.stack(losses), torch.get_rng_state()))
    (plain, plain_losses, plain_rng), (recorded, losses, rng) = states
    assert all(map(equal, plain, recorded))
    assert torch.equal(plain_losses.nan_to_num(7), losses.nan_to_num(7))
    assert torch.equal(plain_rng, rng)


def test_of_accumulated_gradients_the_micro_batch_is_found(tmp_path, timing):
    model, given = make(Root), batches(zero_at=5, number=12)
    optimizer = sgd(model)
    with Recorder(model, folder=tmp_path, loss=squared, **timing) as recorder:
        for number, batch in enumerate(given):
            loss = squared(model(batch), batch)
            recorder.watch(loss, batch)
            (loss / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    (path,) = recorder.written
    dump = read_dump(path)
    assert (path.name, dump.scalars["reason"]) == ("nan-step000001-micro1.pth", "gradients")
    assert torch.equal(dump.arrays["input.x"], given[5])
    assert nandoctor.replay(path, fixes=False).report.cause.code == "gradient-singularity"


class Normalised(torch.optim.Optimizer):
    """Steps of unit length: 0/0 where a parameter has no gradient at all."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


def raise_lr_at(step):
    def before(number, optimizer):
        optimizer.param_groups[0]["lr"] = float("inf") if number == step else 0.01

    return before


def test_an_infinite_learning_rate(tmp_path, timing):
    if not timing:
        timing = {"undo_nbytes": 1 << 20}
    model = make(Root)
    with Recorder(model, folder=tmp_path, loss=squared, **timing) as recorder:
        weights, _ = run(model, sgd(model), batches(), recorder, before=raise_lr_at(2))
    (path,) = recorder.written
    dump = read_dump(path)
    assert (path.name, dump.scalars["reason"]) == ("nan-step000002.pth", "update")
    if timing["undo_nbytes"]:
        assert equal(dump.state, weights[2])
        assert dump.missing == ()
        report = nandoctor.replay(path, fixes=False).report
        assert (report.reproduction.grade, report.verdict) == ("exact", "numerics")
        assert (report.origin.phase, report.origin.op, report.cause.code) == (
            "optimizer",
            "SGD.step",
            "nonfinite-update",
        )
        assert report.cause.evidence[0].text == "the optimizer's lr is inf"
    else:
        assert dump.missing == ("the weights of the step: those in the file are 1 update newer",)


def test_an_infinite_learning_rate_in_a_tensor(tmp_path):
    model = make(Root)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    with Recorder(model, folder=tmp_path, loss=squared) as recorder:
        run(model, optimizer, batches(), recorder, before=lambda *_: optimizer.param_groups[0]["lr"].fill_(torch.inf))
    assert torch.load(recorder.written[0], weights_only=True)["update"]["settings"]["lr"] == torch.inf


def test_an_optimizer_that_divides_by_a_norm_of_zero(tmp_path):
    model = make(Root)
    given = batches()
    with Recorder(model, folder=tmp_path, loss=squared) as recorder:
        model.lift.weight.register_hook(lambda gradient: gradient * (recorder.history.num_steps != 4))
        weights, _ = run(model, Normalised(model.parameters()), given, recorder)
    (path,) = recorder.written
    assert (path.name, equal(read_dump(path).state, weights[4])) == ("nan-step000004.pth", True)
    report = nandoctor.replay(path, fixes=False).report
    assert (report.reproduction.grade, report.cause.code) == ("exact", "nonfinite-update")
    assert (report.origin.place.module, report.origin.elements.num_bad) == ("lift", 16)
    assert report.headline == "Normalised makes lift.weight non-finite, from finite gradients"


def test_adam_in_half_precision(tmp_path):
    model = make(Words).half()
    words = [torch.randint(5, (4, 3)) for _ in range(4)]  # 5, 6 and 7 never come, and have no gradient
    with Recorder(model, folder=tmp_path, loss=squared) as recorder:
        weights, _ = run(model, torch.optim.Adam(model.parameters()), words, recorder)
    (path,) = recorder.written
    dump = read_dump(path)
    assert (path.name, dump.scalars["reason"]) == ("nan-step000000.pth", "update")
    assert equal(dump.state, weights[0])
    report = nandoctor.replay(path, fixes=False).report
    assert (report.reproduction.grade, report.cause.code) == ("exact", "optimizer-eps-underflow")
    assert (report.origin.phase, report.origin.place.module) == ("optimizer", "embed")
