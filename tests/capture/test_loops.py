"""Loops x what fails in them: the file has the step that caused it, from before its update."""

import sys
import warnings
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from loops import LOOPS, Run, adam, loss_of
from torch import nn

import nandoctor
from nandoctor.capture.tensors import Flag
from nandoctor.dumps.reader import read_dump

CAUSES = {"loss": "division-by-zero", "gradients": "gradient-singularity", "update": "nonfinite-update"}
NAMES = {
    ("accumulation", "loss"): "step000001-micro1",
    ("accumulation", "gradients"): "step000001-micro1",
    ("accumulation", "update"): "step000001-micro3",
    ("accumulation, scaler", "gradients"): "step000001-micro1",
}
NOT_THERE = {("LBFGS", "update"), ("LBFGS, marked", "update")}  # see below
QUICK = [loop for loop in LOOPS if "," not in loop]
"""Loops that do two things otherwise than the plain one are left to `-m slow`."""


def is_its_turn(loop, what):
    """The plain loop fails in all three ways, and each of the others quickly in one."""
    return loop == "plain" or list(CAUSES)[list(LOOPS).index(loop) % 3] == what


def of_loop(loop, *what):
    is_quick = loop in QUICK and (not what or is_its_turn(loop, *what))
    return pytest.param(loop, *what, marks=[pytest.mark.slow] * (not is_quick))


EACH = [of_loop(loop, what) for loop in LOOPS for what in CAUSES if (loop, what) not in NOT_THERE]


def train(loop, what, folder, **more):
    function, settings = LOOPS[loop]
    run = Run(what=what, folder=folder, **{**settings, **more})
    function(run)
    if run.recorder is not None:
        run.recorder.close()
    return run


def is_same(one, other):
    """Equal in every bit, NaNs too."""
    if not isinstance(one, torch.Tensor):
        return one == other
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def check(run, name, reason, *, number=None):
    """The first file is of this name and reason, with batch and state as they were; return its path."""
    number = run.failing if number is None else number
    path = run.recorder.written[0]
    dump = read_dump(path)
    assert (path.name, dump.scalars["reason"], dump.missing) == (f"nan-{name}.pth", reason, ())
    assert torch.equal(dump.arrays["input.x"], run.batches[number][0])
    assert all(is_same(dump.state[name], tensor) for name, tensor in run.states[number].items())
    return path


@pytest.mark.parametrize(("loop", "what"), EACH)
def test_the_step_that_caused_it_is_saved(tmp_path, loop, what):
    run = train(loop, what, tmp_path)
    name = NAMES.get((loop.replace(", marked", ""), what), NAMES.get((loop.replace(", scaler", ""), what)))
    reason = "skipped" if run.scales and what == "gradients" else what
    number = 7 if name is not None and name.endswith("micro3") else None
    path = check(run, name or "step000003", reason, number=number)
    if is_its_turn(loop, what):  # a replay takes a second
        report = nandoctor.replay(path, fixes=False).report
        assert (report.reproduction.grade, report.cause.code) == ("exact", CAUSES[what])


@pytest.mark.parametrize("loop", [of_loop(loop) for loop in LOOPS])
def test_training_is_bit_identical_with_a_recorder(tmp_path, loop):
    ends = []
    for folder in (None, tmp_path):
        run = train(loop, "loss" if "LBFGS" in loop else "gradients", folder)
        state = [tensor for entry in run.optimizer.state.values() for tensor in entry.values()]
        tensors = [*run.net.state_dict().values(), *state, torch.rand(3)]
        ends.append([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
    assert len(ends[0]) == len(ends[1]) > 5
    assert all(map(is_same, *ends))
    assert list(tmp_path.glob("*.pth"))


@pytest.mark.parametrize("what", CAUSES)
@pytest.mark.parametrize("copies", [True, False])
def test_flags_that_arrive_late(tmp_path, monkeypatch, what, copies):
    """As those of a device do, with or without room for a copy of the weights."""
    monkeypatch.setattr(Flag, "on_device", property(lambda _: True))
    run = train("plain", what, tmp_path, make_optimizer=adam, options={} if copies else {"undo_nbytes": 0})
    if what == "update" and not copies:
        missing = read_dump(run.recorder.written[0]).missing
        assert missing == ("the weights of the step: those in the file are 1 update newer",)
    else:
        check(run, "step000003", what)


@pytest.mark.parametrize("loop", ["LBFGS", "LBFGS, marked"])
def test_lbfgs_that_spoils_the_weights_between_two_calls(tmp_path, loop):
    """An infinite learning rate: the next call of the closure meets weights that are NaN."""
    path = check(train(loop, "update", tmp_path), "step000003", "update")
    assert nandoctor.replay(path, fixes=False).report.cause.code == "nonfinite-update"


def test_a_step_saved_as_asked_replays_exactly(tmp_path):
    run = Run(folder=tmp_path)
    for number, batch in run:
        run.backward(run.loss(batch))
        run.update(number)
        if number == 1:
            path = run.recorder.save("odd images")
    run.recorder.close()
    assert run.recorder.written == (path,) == (tmp_path / "step-step000001.pth",)
    assert all(is_same(read_dump(path).state[name], tensor) for name, tensor in run.states[1].items())
    assert nandoctor.replay(path, fixes=False).report.reproduction.grade == "exact"


class UnprintableError(AssertionError):
    """An error that raises another where it is read."""

    def __str__(self):
        raise ValueError


def insist(model):
    """What loops do that would rather die than train on."""
    if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
        raise UnprintableError


CHECKS = {
    "assertion": insist,
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True),
    "anomaly": id,
}


@pytest.mark.parametrize("watched", ["with", "step", "exit"])
@pytest.mark.parametrize("way", CHECKS)
def test_a_loop_that_dies_of_its_gradients(tmp_path, monkeypatch, way, watched):
    run = Run(what="gradients", folder=tmp_path)

    def loop():
        with run.recorder if watched == "with" else nullcontext(), torch.autograd.set_detect_anomaly(way == "anomaly"):
            for number, batch in run:
                with run.step(batch) if watched == "step" else nullcontext():
                    run.backward(run.loss(batch))
                    CHECKS[way](run.net)
                    run.update(number)

    with pytest.raises((AssertionError, RuntimeError)) as caught, warnings.catch_warnings(action="ignore"):
        loop()
    if watched == "exit":
        monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
        run.recorder._at_exit()
    run.recorder.close()
    check(run, "step000003", "gradients")


class Raising(nn.Module):
    def __init__(self, check="logits"):
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)
        self.check = check

    def forward(self, x):
        logits = self.linear(x)
        if self.check == "name":
            raise ValueError("norm must be one of 'inf', 'l2'")
        if self.check == "temporary":
            return torch.multinomial(logits / logits.norm(), 1)
        if self.check == "filled":
            return torch.full((3,), float("inf")).minimum(logits) @ torch.ones(2)
        ratios = logits / logits.norm(dim=1, keepdim=True)
        assert self.check != "bare" or ratios.isfinite().all()
        return torch.distributions.Categorical(logits=ratios, validate_args=True).probs


@pytest.mark.parametrize(
    ("check", "saved"), [("logits", True), ("bare", True), ("temporary", False), ("name", False), ("filled", False)]
)
def test_a_forward_that_raises_for_its_own_nan(tmp_path, caplog, check, saved):
    """What its variables hold of the weights' products tells, not a word in the message alone."""
    model, batch = Raising(check), torch.zeros(2, 4)
    recorder = nandoctor.Recorder(model, folder=tmp_path)
    with pytest.raises((ValueError, AssertionError, RuntimeError)), recorder, recorder.step(batch):
        model(batch)
    assert len(recorder.written) == saved
    assert ("the forward raised an error, and a value in it is non-finite" in caplog.text) == saved
    for path in recorder.written:
        report = nandoctor.replay(path, model=partial(Raising, check), fixes=False).report
        assert (report.origin.phase, report.origin.op) == ("forward", "div")


@pytest.mark.parametrize("ends", [ValueError("loss"), KeyError("name"), KeyboardInterrupt()], ids=repr)
def test_a_loss_that_raises_before_it_is_watched(tmp_path, caplog, ends):
    def refuse(loss):
        if not loss.isfinite() or not isinstance(ends, ValueError):
            raise ends

    model = nn.Linear(4, 3)
    recorder = nandoctor.Recorder(model, folder=tmp_path, arguments={"in_features": 4, "out_features": 3})
    with pytest.raises(type(ends)), recorder, recorder.step():
        refuse(model(torch.ones(2, 4)).mean() / (0 if isinstance(ends, ValueError) else 1))
    assert len(recorder.written) == isinstance(ends, ValueError)
    assert ("the step raised an error, and a value in it is non-finite" in caplog.text) == bool(recorder.written)
    assert ("step 0 ended in an exception (KeyError)" in caplog.text) == isinstance(ends, KeyError)


@pytest.mark.parametrize("marks", ["begin, end", "begin", ""])
def test_a_forward_whose_error_the_loop_catches(tmp_path, marks):
    model = Raising()
    recorder = nandoctor.Recorder(model, folder=tmp_path)
    for batch in (torch.zeros(2, 4), torch.ones(2, 4)):
        if "begin" in marks:
            recorder.begin(batch)
        with suppress(ValueError):
            model(batch)
        if "end" in marks:
            recorder.end()
    assert [path.name for path in recorder.written] == ["nan-step000000.pth"]


def test_a_call_in_place_of_one_that_raised(tmp_path):
    model, batch = Raising(), torch.zeros(2, 4)
    recorder = nandoctor.Recorder(model, folder=tmp_path)
    with recorder.step(batch):
        try:
            model(batch)
        except ValueError:
            model(batch + 1)
        saved = recorder.save()
    assert recorder.written == (saved,)
    (call,) = torch.load(saved, weights_only=True)["calls"]
    assert torch.equal(call["args"][0], batch + 1)


@pytest.mark.parametrize("ends", [KeyboardInterrupt, FileNotFoundError])
def test_a_loop_that_is_stopped_while_the_scaler_searches(tmp_path, ends):
    """The skip of its step is how the scaler finds its scale; the error has nothing to do with it."""
    run = Run(folder=tmp_path, scales=True)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    recorder = nandoctor.Recorder(run.net, folder=tmp_path, scaler=run.scaler, loss=loss_of)
    with suppress(ends), recorder:
        recorder.watch(loss := 1e30 * loss_of(run.net(run.batches[0][0]), run.batches[0]))
        run.backward(loss)
        if ends is FileNotFoundError:
            run.update(0)
        raise ends
    assert recorder.written == run.recorder.written == ()
