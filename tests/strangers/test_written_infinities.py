"""Infinities that the code writes down: in a dozen ways as masks, which are innocent, and in a few that are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding, pad

import nandoctor
from nandoctor.replaying import setup
from strangers.visits import blamed, line, normal

HEALTHY = ("healthy",)
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


def by_assignment(scores):
    scores = scores.clone()
    scores[:, CAUSAL] = -math.inf
    return scores


def by_assignment_to_columns(scores):
    scores = scores.clone()
    scores[..., 3:] = -math.inf
    return scores


def by_where_with_a_tensor(scores):
    return torch.where(CAUSAL, torch.tensor(-math.inf, dtype=scores.dtype), scores)


def by_adding_an_array(scores):
    return scores + torch.from_numpy(np.triu(np.full((5, 5), -np.inf, np.float32), 1)).to(scores.dtype)


def by_a_table(scores):
    table = torch.tensor([[0.0], [-math.inf]])
    return scores + embedding(CAUSAL.long(), table).squeeze(-1).to(scores.dtype)


def by_the_logarithm_of_a_mask(scores):
    return scores + torch.log((~CAUSAL).to(scores.dtype))


def by_index(scores):
    return scores.index_fill(-1, torch.tensor([3, 4]), -math.inf)


def by_padding(scores):
    return pad(scores[..., :4], (0, 1), value=-math.inf)


def with_a_temperature(scores):
    return scores.masked_fill(CAUSAL, -math.inf) / 0.5


WAYS = [
    by_assignment,
    by_assignment_to_columns,
    by_where_with_a_tensor,
    by_adding_an_array,
    by_a_table,
    by_the_logarithm_of_a_mask,
    by_index,
    by_padding,
    with_a_temperature,
]
in_all_ways = pytest.mark.parametrize("hide", WAYS, ids=lambda hide: hide.__name__)


class Attention(nn.Module):
    def __init__(self, hide):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.hide = hide

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.hide(x @ x.mT).softmax(-1) @ x)


class Choice(nn.Module):
    """The masked scores are the output."""

    def __init__(self, hide):
        super().__init__()
        self.score = nn.Linear(8, 5)
        self.hide = hide

    def forward(self, x):
        return self.hide(self.score(x))


@in_all_ways
def test_a_mask_that_dies_in_a_softmax(examine, hide):
    report = examine(Attention(hide), {"x": normal(2, 5, 8)}, loss=lambda output, _: output.float().square().mean())
    assert blamed(report) == HEALTHY
    assert not report.bad_gradients


@in_all_ways
def test_a_mask_in_the_output(examine, hide):
    assert blamed(examine(Choice(hide), {"x": normal(2, 5, 8)})) == HEALTHY


@in_all_ways
def test_a_mask_beside_a_product_that_overflows(examine, hide):
    model = Attention(hide)
    with torch.no_grad():
        model.head.weight.mul_(2e4)
    report = examine(model, {"x": 10 * normal(2, 5, 8)})
    assert blamed(report) == ("precision", "head", "linear", "matmul-overflow")


@pytest.mark.parametrize("hide", [by_where_with_a_tensor, by_the_logarithm_of_a_mask, by_padding])
def test_a_label_that_is_masked(examine, hide):
    def loss(output, batch):
        return cross_entropy(output[:, 0].float(), batch["label"])

    batch = {"x": normal(2, 5, 8), "label": torch.tensor([0, 0])}
    assert blamed(examine(Choice(hide), batch, loss=loss, inputs="x")) == HEALTHY
    report = examine(Choice(hide), {**batch, "label": torch.tensor([0, 4])}, loss=loss, inputs="x")
    assert (report.verdict, report.origin.place.module, report.cause.code) == ("numerics", "", "log-of-zero")
    assert line(report) in {"return " + text for text in LINES}


LINES = (
    "torch.where(CAUSAL, torch.tensor(-math.inf, dtype=scores.dtype), scores)",
    "scores + torch.log((~CAUSAL).to(scores.dtype))",
    "pad(scores[..., :4], (0, 1), value=-math.inf)",
)


def test_scores_that_overflow_after_they_were_masked(examine):
    class Sharp(nn.Module):
        def forward(self, x):
            scores = (x @ x.mT).masked_fill(CAUSAL, -math.inf)
            return (scores * 40.0).softmax(-1) @ x

    report = examine(Sharp(), {"x": 30 * normal(2, 5, 8)})
    assert blamed(report) == ("precision", "", "mul", "elementwise-overflow")
    assert line(report) == "return (scores * 40.0).softmax(-1) @ x"


def test_an_infinite_distance_that_is_never_the_smallest(examine):
    class Nearest(Attention):
        def forward(self, x):
            x = self.embed(x)
            distance = torch.cdist(x, x) + torch.diag(torch.full((5,), math.inf))
            return self.head(x) * distance.amin(-1, keepdim=True)

    assert blamed(examine(Nearest(None), {"x": normal(2, 5, 8)})) == HEALTHY


def test_an_infinite_distance_that_goes_into_the_next_layer(examine):
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(5, 2)

        def forward(self, x):
            return self.read(torch.cdist(x, x).masked_fill(torch.eye(5, dtype=torch.bool), math.inf))

    report = examine(Distances(), {"x": normal(2, 5, 8)})
    assert blamed(report) == ("numerics", "", "masked_fill", "indeterminate-form")


def test_two_infinities_that_meet(examine):
    class Gap(nn.Module):
        def forward(self, x):
            return x.masked_fill(x < 0, math.inf) - x.masked_fill(x < 1, math.inf)

    assert blamed(examine(Gap(), {"x": normal(4, 8)})) == ("numerics", "", "sub", "indeterminate-form")


def test_a_logarithm_that_numpy_took_of_zero(examine):
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(5, 2)

        def forward(self, x):
            with np.errstate(divide="ignore"):
                levels = np.log(x.numpy())
            return self.read(torch.from_numpy(levels))

    silent = normal(3, 5).abs()
    silent[1, 2] = 0
    report = examine(Loud(), {"x": silent})
    assert (report.verdict, line(report)) == ("numerics", "return self.read(torch.from_numpy(levels))")
    assert blamed(examine(Loud(), {"x": silent + 1})) == HEALTHY


def of_places(hidden):
    """Positions that bf16 rounds to one and the same."""
    place = torch.tensor([1.0, 256, 257, 300, 400]).to(hidden.dtype)
    return 1 / (place[:, None] - place).abs()


def of_shares(function):
    return lambda hidden: function((torch.eye(5) + torch.eye(5).roll(1, 0) * 1e-9).to(hidden.dtype))


@pytest.mark.parametrize(
    ("make", "amp_dtype", "cause"),
    [
        (of_places, "bfloat16", "division-by-zero"),
        (of_shares(torch.log), "float16", "log-of-zero"),
        (of_shares(lambda share: share.pow(-0.5)), "float16", "division-by-zero"),
    ],
    ids=["positions", "log", "root"],
)
def test_more_infinities_than_are_meant(examine, make, amp_dtype, cause):
    """A mask removes those that fp32 has too; what rounding adds to them is left, and the op is to blame for it."""

    class Weighted(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x)
            made = make(hidden)
            meant = make(hidden.float()).isinf()
            return made.to(hidden.dtype).masked_fill(meant, 0) @ hidden

    report = examine(Weighted(4, 4), {"x": normal(5, 4)}, amp_dtype=amp_dtype)
    assert (report.verdict, report.cause.code) == ("precision", cause)
    assert report.origin.op in ("reciprocal", "div", "log", "pow")


class Sloped(nn.Module):
    """Attention with ALiBi's slopes and the causal mask in one buffer."""

    def __init__(self):
        super().__init__()
        distance = torch.arange(5.0)[:, None] - torch.arange(5.0)
        self.register_buffer("bias", (-distance).masked_fill(CAUSAL, -math.inf))

    def forward(self, x, padding):
        scores = (x @ x.mT + self.bias).masked_fill(padding[:, None], -math.inf)
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(("spoilt", "cause"), [(False, "fully-masked-softmax"), (True, "poisoned-buffers")])
def test_a_buffer_that_the_model_fills_with_a_mask(tmp_path, monkeypatch, spoilt, cause, is_large):
    """What the constructor writes itself is no damage; one -inf more is. A large model is built unfilled."""
    monkeypatch.setattr(setup, "_UNFILLED_NBYTES", 0 if is_large else math.inf)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 0] = True
    state = Sloped().state_dict()
    state["bias"][2, 1] = -math.inf if spoilt else -1.0
    torch.save({"state_dict": state, "x": normal(3, 5, 4), "padding": padding}, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", model=Sloped, fixes=False).report
    assert report.cause.code == cause
    assert (report.verdict == "state") == spoilt


def test_a_mask_beside_a_broken_buffer_is_not_reset(tmp_path):
    """The verified reset of the statistics would have let the model look ahead."""

    class Normed(Sloped):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x, padding):
            return self.norm(super().forward(x, padding))

    state = Normed().state_dict()
    state["norm.running_mean"][1] = math.nan
    batch = {"x": normal(3, 5, 4), "padding": torch.zeros(3, 5, dtype=torch.bool)}
    torch.save({"state_dict": state, **batch}, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", model=Normed, mode="eval").report
    (fix,) = [fix for fix in report.fixes if fix.kind == "state"]
    assert fix.verified
    model = Normed()
    exec(fix.patch, {"model": model})
    assert torch.equal(model.bias, Normed().bias)
    assert "statistics" in fix.patch


def test_a_causal_mask_among_the_weights_is_no_damage(tmp_path):
    batch = {"x": normal(3, 5, 4), "padding": torch.zeros(3, 5, dtype=torch.bool)}
    torch.save({"state_dict": Sloped().state_dict(), **batch}, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", model=Sloped, fixes=False).report
    assert blamed(report) == HEALTHY
    assert not any("saved state" in note for note in report.notes)


def test_a_buffer_that_the_model_builds_infinite(tmp_path):
    """No checkpoint from before has another value."""

    class Frequencies(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inverse", 1 / torch.arange(4.0))

        def forward(self, x):
            return (x * self.inverse).sin()

    torch.save({"state_dict": Frequencies().state_dict(), "x": normal(3, 4)}, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", model=Frequencies).report
    assert report.cause.code == "poisoned-buffers"
    assert report.headline.endswith("is +Inf in 1 of 4 values as the model's own code builds it")
    assert not any(fix.verified for fix in report.fixes)
    assert report.next_steps[0].startswith("Look at the code that builds the model")
    assert any("only the code that builds the model knows" in note for note in report.search_notes)


@pytest.mark.parametrize("hands_out", [lambda model: model, lambda model: lambda: model])
def test_a_trained_model_that_a_builder_hands_out(hands_out, tmp_path):
    """What a notebook has is as broken as the file; only what a builder makes anew tells what the code writes."""
    model = nn.BatchNorm1d(3)
    model.running_mean[1] = math.inf
    torch.save({"state_dict": model.state_dict(), "input": torch.randn(4, 3)}, tmp_path / "nan.pth")
    report = nandoctor.replay(tmp_path / "nan.pth", hands_out(model), mode="eval", fixes=False).report
    assert (report.verdict, report.cause.code) == ("state", "poisoned-buffers")
    assert "checkpoint" in report.next_steps[0]
