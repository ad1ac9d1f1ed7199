"""The precision that a step failed in is found by the weights, the saved output and the grade of a replay."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor.autocast.policy import cuda_autocast
from nandoctor.errors import LossError, ModelError

X = torch.linspace(-2, 2, 32).reshape(4, 8)


class Stretched(nn.Module):
    """Scales what a linear layer gives, keeps one row as it is, and normalises nothing."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.scale = nn.Linear(8, 8), scale

    def forward(self, x):
        hidden = self.inner(x)
        return torch.cat([hidden[:1], hidden[1:] * self.scale])


@pytest.fixture
def replay(replay):
    return partial(replay, mode="train", fixes=False)


def under(report):
    """The verdict, whether autocast was on, the format of the replay and how it agrees."""
    run = report.runs.autocast
    return report.verdict, run.policy, run.dtype.label, report.reproduction.grade


def in_training(model, x, dtype):
    """What a training would have saved: the output under CUDA's autocast, or without any."""
    if dtype is None:
        return model(x).detach()
    with cuda_autocast(dtype):
        return model(x).detach()


class Squared(Stretched):
    """CUDA's autocast squares in fp32, and the CPU's does not."""

    def forward(self, x):
        return self.inner(x).square() / self.scale


def test_a_training_on_the_cpu_is_found_by_its_output(replay):
    model, x = Squared(1e4), 2000 * X
    with torch.autocast("cpu", dtype=torch.float16):
        saved = model(x).detach()
    assert under(replay(model, {"x": x, "logit": saved})) == ("precision", "native", "fp16", "exact")


@pytest.mark.parametrize(("number", "grade"), [(1.0, "exact"), (3.0, "same-mask")])
def test_a_saved_number_that_is_named_is_compared(replay, number, grade):
    model = Squared(1.0)
    mean = model(X).mean().item() * number
    report = replay(model, {"x": X, "value": mean}, call=lambda net, batch: net(batch["x"]).mean(), output="value")
    assert (report.reproduction.output, report.reproduction.grade) == ("value", grade)


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        (torch.float16, 1e6, ("precision", "cuda", "fp16", "exact")),
        (torch.bfloat16, 1e39, ("numerics", "cuda", "bf16", "exact")),
        (torch.bfloat16, 1e6, ("healthy", "cuda", "bf16", "exact")),
        (None, 1e39, ("numerics", "none", "fp32", "exact")),
        (None, 1e6, ("healthy", "none", "fp32", "exact")),
    ],
)
def test_the_policy_is_the_one_that_agrees(replay, dtype, scale, expected):
    model = Stretched(scale)
    report = replay(model, {"x": X, "logit": in_training(model, X, dtype).float()})  # as a loop saves it
    assert under(report) == expected
    if dtype is None:
        assert "autocast" not in report.headline.replace("without autocast", "")


@pytest.mark.parametrize(
    ("name", "dtype"), [("depth", None), ("image", torch.bfloat16), ("target", None), ("batch.y", torch.bfloat16)]
)
def test_the_output_may_have_any_name(replay, name, dtype):
    report = replay(Stretched(1e6), {"x": X, name: in_training(Stretched(1e6), X, dtype), "weights": torch.ones(3)})
    assert under(report)[2:] == ("bf16" if dtype else "fp32", "exact")
    assert report.reproduction.output == name
    assert not any("was assumed" in note for note in report.notes)


def test_a_precision_that_nothing_shows_is_said_to_be_assumed(replay):
    for saved, output in (({}, None), ({"depth": torch.ones(3)}, "depth")):
        report = replay(Stretched(1e6), {"x": X, **saved})
        assert (report.reproduction.grade, report.reproduction.output) == ("no-reference", output)
        assert any("fp16 autocast was assumed (--amp-dtype)" in note for note in report.notes)


def of_two_dtypes(shift, output, _):
    """A loss that raises under autocast: an index assignment casts nothing. Its root is at 0 in one row."""
    weight = torch.zeros_like(output[:, 0])
    weight[torch.arange(len(output))] = torch.ones(len(output), dtype=torch.float32)
    distance = (output - output[:1]).square().sum(-1) + shift
    return (weight * distance.sqrt()).sum()


def after_a_quotient(output, batch):
    """The same after a NaN, of which the error may be a consequence."""
    spoilt = (output - output) / (output - output).detach()
    return spoilt.sum() + of_two_dtypes(1.0, output, batch)


@pytest.mark.parametrize(
    ("loss", "op"), [(partial(of_two_dtypes, 0.0), "sqrt"), (after_a_quotient, "div")], ids=["backward", "loss"]
)
def test_an_assumed_precision_in_which_the_step_raises_is_none(replay, loss, op):
    report = replay(Stretched(1.0), {"x": X}, loss=loss)
    assert under(report) == ("numerics", "none", "fp32", "no-reference")
    assert report.origin.op == op


def test_a_sound_step_that_the_assumed_precision_stops_says_so(replay):
    with pytest.raises(LossError) as caught:
        replay(Stretched(1.0), {"x": X}, loss=partial(of_two_dtypes, 1.0))
    assert "fp16 autocast was assumed" in caught.value.remedy
    assert caught.value.options == ("--amp-dtype", "none")
    with pytest.raises(ModelError, match=r"(?s)^(?!.*assumed)"):  # it does not run without autocast either
        replay(Stretched(1.0), {"x": X[:, :5]})


def told(low):
    return [f"The model is built in fp32, the dump's weights are {low}: it was replayed in {low}."]


@pytest.mark.parametrize(
    ("computed", "saved", "builds", "verdict", "note"),
    [
        (torch.float16, torch.float16, torch.float32, "precision", told("fp16")),
        (torch.float16, torch.float32, torch.float16, "precision", []),  # every value is one of fp16
        (torch.float64, torch.float64, torch.float32, "healthy", told("fp64")),  # a default set under `__main__`
    ],
)
def test_the_model_is_replayed_in_the_format_of_its_weights(replay, computed, saved, builds, verdict, note):
    scale = 1e39 if computed is torch.float64 else 1e6
    model = Stretched(scale).to(computed)
    batch = {"x": X.to(computed), "logit": model(X.to(computed)).detach()}
    report = replay(copy.deepcopy(model).to(saved), batch, builds=Stretched(scale).to(builds))
    assert (report.verdict, report.reproduction.grade) == (verdict, "exact")
    assert [text for text in report.notes if "it was replayed in" in text] == note


def test_weights_a_half_model_cannot_hold_stay_in_fp32(replay):
    """The training kept them in fp32: 1e5 is not an infinity that it had."""
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight[0, 0] = 1e5
    with cuda_autocast(torch.float16), torch.no_grad():
        logit = model(X)
    report = replay(model, {"x": X, "logit": logit}, builds=nn.Linear(8, 8).half())
    assert report.reproduction.grade == "exact"
    assert report.headline.startswith("The weight `weight` reaches 100,000; fp16 holds at most 65,504")
    assert any("the dump's weights are fp32: it was replayed in fp32" in note for note in report.notes)


def test_an_output_of_nan_alone_tells_of_no_precision(replay):
    model = nn.Sequential(Stretched(1e6), nn.LayerNorm(8))
    report = replay(model, {"x": X, "logit": torch.full((4, 8), torch.nan)})
    assert any("shows the precision" in note for note in report.notes)
    told = replay(model, {"x": X, "logit": torch.full((4, 8), torch.nan)}, amp_dtype="bfloat16")
    assert not any("shows the precision" in note for note in told.notes)


def test_autocast_is_tried_where_the_dump_contradicts_its_output(tmp_path):
    model = Stretched(1e6)
    contents = {
        "format": "nandoctor.dump/1",
        "state_dict": model.state_dict(),
        "calls": [{"names": ["x"], "args": (X,), "kwargs": {}}],
        "output": {"y": in_training(model, X, torch.float16)},
        "training": {"": True},
        "autocast": {"enabled": False, "device": "cpu", "dtype": "float16"},
    }
    torch.save(contents, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", model, fixes=False).report
    assert under(report) == ("precision", "cuda", "fp16", "exact")
    assert any("autocast was off" in note for note in report.notes)


class Axes(nn.Module):
    """A decomposition that no half precision has a kernel for, of a product that autocast computes in it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.linalg.eigh(self.scale * x.mT @ x)[1]


def test_a_model_that_runs_without_autocast_alone(replay):
    x = torch.cat([torch.eye(3), torch.zeros(1, 3)])
    report = replay(Axes(), {"x": x, "output": Axes()(x).detach()})
    assert under(report)[1:] == ("none", "fp32", "exact")


def rooted(output, _):
    """A logarithm of an eps that is 0 in fp16, and a root whose gradient is infinite in any precision."""
    return torch.log(output * 0 + 1e-8).mean() + (output - output).sqrt().mean()


def test_gradients_that_fail_in_fp32_are_told_without_fp16(replay):
    report = replay(Stretched(100.0), {"x": X}, loss=rooted)
    assert (report.verdict, report.origin.op, report.origin.phase) == ("numerics", "sqrt", "backward")
    assert not any("fp16" in text for text in (report.headline, *report.notes))


def sized(output, batch):
    return (output.float() - batch["wanted"]).square().mean()


@pytest.mark.parametrize(("size", "verdict"), [(1e9, "cannot-tell"), (1e3, "healthy")])
def test_a_loss_that_any_precision_gives_supports_no_alarm(replay, size, verdict):
    """The target is so large that fp16 and fp32 give the same loss; the gradients of 1e9 overflow in fp16."""
    batch = {"x": X, "wanted": torch.full((4, 8), size)}
    loss = sized(Stretched(1.0)(X), batch).item()
    report = replay(Stretched(1.0), {**batch, "loss": loss}, loss=sized)
    assert report.verdict == verdict
    told = "The step is sound in fp32. Under fp16 autocast, which nothing in the file shows, it fails."
    assert report.headline.startswith(told) == (verdict == "cannot-tell")
    assert ("Pass --amp-dtype float16 if that was on" in report.next_steps[0]) == (verdict == "cannot-tell")
    known = replay(Stretched(1.0), {**batch, "loss": loss, "amp": True}, loss=sized)
    assert known.verdict == ("precision" if verdict == "cannot-tell" else verdict)
