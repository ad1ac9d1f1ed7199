"""Loops and models that are written otherwise than most: what failed is saved from before its update, and replayed."""

from contextlib import nullcontext

import pytest
import torch
from loops import Net, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import nandoctor
from nandoctor import Recorder
from nandoctor.dumps.reader import read_dump
from nandoctor.errors import ModelError


class Unmixed(Net):
    """Each row by itself, so that a transform may see it alone."""

    def __init__(self, divides=True):
        super().__init__(divides)
        self.norm, self.dropout = nn.Identity(), nn.Identity()


class InPlace(Net):
    def forward(self, x):
        return super().forward(x.div_(x.norm(dim=-1, keepdim=True)))


class Lazy(Net):
    def __init__(self):
        super().__init__(divides=True)
        self.enter, self.norm = nn.LazyLinear(8, bias=False), nn.LazyBatchNorm1d()


class Reentrant(Net):
    """Reentrant checkpointing has gradients only where an input wants some."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class Recurrent(Net):
    """On a CPU an LSTM without a graph is another kernel, which rounds otherwise."""

    def __init__(self):
        super().__init__(divides=True)
        self.norm = nn.Sequential(nn.LSTM(8, 8), Last())


class Last(nn.Module):
    def forward(self, made):
        return made[0]


@pytest.mark.parametrize(
    ("make", "reason", "op"),
    [(Recurrent, "loss", "div"), (InPlace, "loss", "div"), (Lazy, "loss", "div"), (Reentrant, "gradients", "sqrt")],
)
def test_the_failing_step_is_saved_and_replayed(tmp_path, make, reason, op):
    model = make()
    with Recorder(model, folder=tmp_path) as recorder:
        for number in range(3):
            x, y = torch.randn(5, 4), torch.randn(5, 1)
            x[2] *= number < 2
            loss = loss_of(model(x.requires_grad_(make is Reentrant)), (x, y))
            recorder.watch(loss, (x, y))
            if loss.isfinite():
                loss.backward()
                torch.optim.SGD(model.parameters(), 1e-3).step()
                model.zero_grad()
    saved = read_dump(recorder.written[0])
    assert (saved.scalars["reason"], saved.scalars["step"]) == (reason, 2)
    assert all(value.isfinite().all() for value in saved.state.values())
    report = nandoctor.replay(saved.path, model=make, loss=loss_of, fixes=False).report
    assert (report.reproduction.grade, report.origin.op) == ("exact", op)


def test_buffers_of_torchscript_are_told(tmp_path):
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(4)), nn.Linear(4, 1))
    with Recorder(model, folder=tmp_path) as recorder:
        recorder.watch(model(torch.full((2, 4), torch.inf)).sum())
    assert "state_dict.0.running_mean: the file has its value from after" in str(read_dump(recorder.written[0]).missing)


class Costed(nn.Linear):
    """Returns its loss, as many models for language and for detection do: beside its output, inside of it, or alone."""

    def __init__(self, form):
        super().__init__(2, 2)
        self.form = form

    def forward(self, x, target):
        output = super().forward(x)
        loss = (output - target).square().mean().log()
        return {"pair": (output, loss), "parts": {"out": output, "parts": [loss, 0.0]}, "alone": loss}[self.form]


@pytest.mark.parametrize(
    ("form", "place", "take"),
    [
        ("pair", "[1]", lambda made: made[1]),
        ("parts", "parts[0]", lambda made: made["parts"][0]),
        ("alone", "", lambda made: made.view(1)),
    ],
)
def test_a_loss_that_the_model_returns_is_found(tmp_path, caplog, form, place, take):
    with Recorder(model := Costed(form), folder=tmp_path, arguments={"form": form}) as recorder:
        with torch.no_grad():
            model.weight.zero_(), model.bias.fill_(2)
        recorder.watch(take(model(torch.ones(3, 2), torch.tensor(2.0))))
    assert "outside of the model" not in caplog.text
    assert read_dump(recorder.written[0]).recorded.loss_field == place
    report = nandoctor.replay(recorder.written[0], model=Costed, model_args={"form": form}, fixes=False).report
    assert (report.reproduction.grade, report.cause.code, len(report.bad_gradients)) == ("exact", "log-of-zero", 2)


def test_an_argument_that_no_file_can_hold_is_told_at_once(tmp_path, caplog):
    class Rows(Net):
        def forward(self, rows):
            return super().forward(torch.stack(list(rows)))

    model = Rows()
    with Recorder(model, folder=tmp_path):
        for _ in range(2):
            model(row for row in torch.ones(3, 4))
    told = [record.message for record in caplog.records if "a file cannot hold" in record.message]
    assert len(told) == 1
    assert "input.args.0: a generator" in told[0]


def test_what_a_transform_hides_is_named(tmp_path):
    model = Unmixed()

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x.unsqueeze(0),)).sum()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with Recorder(model, folder=tmp_path) as recorder:
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.zeros(3, 4))
        recorder.watch(found["leave.weight"].mean(), torch.zeros(3, 4))
    left_out = torch.load(recorder.written[0], weights_only=True)["left_out"]
    assert any("torch.func.vmap" in line for line in left_out)
    with pytest.raises(ModelError, match=r"is not in the file: input\.args\.0") as caught:
        nandoctor.replay(recorder.written[0], Unmixed())
    assert "--inputs" in caught.value.remedy


def test_weights_from_functional_call_are_told(tmp_path, caplog):
    model, x = Net(), torch.zeros(3, 4)
    with Recorder(model, folder=tmp_path) as recorder:
        own = dict(model.named_parameters())
        inner = torch.func.functional_call(model, own, (x,)).square().mean()
        gradients = torch.autograd.grad(inner, tuple(own.values()), create_graph=True)
        fast = {name: own[name] - gradient for name, gradient in zip(own, gradients, strict=True)}
        recorder.watch(torch.func.functional_call(model, fast, (x,)).mean())
    told = "the weights of the step: torch.func.functional_call gave the model others than its own"
    assert told in "".join(torch.load(recorder.written[0], weights_only=True)["left_out"])
    assert "record a module that holds the model" in caplog.text


def test_a_step_of_another_model_is_told_and_not_saved(tmp_path, caplog):
    model, other = Net(), nn.Linear(4, 1)
    recorder = Recorder(model, folder=tmp_path)
    for net in (model, model, other, other):
        optimizer = torch.optim.Adam(net.parameters())
        loss = net(torch.randn(5, 4)).sum() * (torch.nan if net is other else 1)
        recorder.watch(loss)
        loss.backward()
        optimizer.step()
    assert recorder.written == ()
    assert caplog.text.count("give that to a new Recorder") == 1


class Opening(nn.Module):
    """A wrapper as Fabric's: it casts the inputs, opens autocast, and has the state of what it holds."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def state_dict(self, *args, **kwargs):
        return self.inner.state_dict(*args, **kwargs)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x.float()).float()


def test_a_wrapper_that_opens_autocast_is_looked_into(tmp_path):
    model = Opening(nn.Linear(4, 2))
    with Recorder(model, folder=tmp_path, arguments={"in_features": 4, "out_features": 2}) as recorder:
        recorder.watch(model(torch.ones(3, 4, dtype=torch.float64)).sum() * torch.nan)
    recorded = read_dump(recorder.written[0]).recorded
    assert (recorded.model.name, recorded.autocast.dtype) == ("Linear", "bfloat16")
    assert nandoctor.replay(recorder.written[0], fixes=False).report.reproduction.grade == "exact"


@pytest.mark.parametrize("marks", ["watch", "step, watch", "step"])
def test_a_loop_that_calls_another_method_goes_on(tmp_path, caplog, marks):
    model = Net()
    with Recorder(model, folder=tmp_path) as recorder:
        for _ in range(3):
            with recorder.step() if "step" in marks else nullcontext():
                loss = model.enter(torch.randn(5, 4)).sum()
                if "watch" in marks:
                    recorder.watch(loss)
    assert caplog.text.count("let `forward` call them") == 1


def test_a_fix_is_written_for_the_autocast_of_the_training(tmp_path):
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    with Recorder(model, folder=tmp_path) as recorder, torch.autocast("cpu", dtype=torch.float16):
        recorder.watch(model(torch.full((2, 4), 6e4)))
    fixes = nandoctor.replay(recorder.written[0], model=model).report.fixes
    assert any('torch.autocast("cpu", enabled=False)' in fix.patch for fix in fixes)
    assert not any('"cuda"' in fix.patch for fix in fixes)
