"""Targets, weights and infinities that were there before: told as what they are, in numbers that do not conflict."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from strangers.visits import blamed, normal

LOSSES = {
    "mse": F.mse_loss,
    "selected": lambda out, target: (out[:, 2] - target[:, 2]).square().mean(),
    "normalised": lambda out, target: F.l1_loss(out, (target - target.mean()) / target.std()),
    "logits": F.binary_cross_entropy_with_logits,
    "cast": lambda out, target: (out - target.half().float()).abs().mean(),
}


def target(number):
    values = normal(4, 8)
    values[1, 2] = number
    return values


@pytest.mark.parametrize("name", LOSSES)
def test_nan_target_that_the_loss_meets_first(examine, name):
    batch = {"x": normal(4, 8), "target": target(math.nan)}
    report = examine(nn.Linear(8, 8), batch, loss=lambda out, batch: LOSSES[name](out.float(), batch["target"]))
    assert blamed(report) == ("input", "", None, "poisoned-target")


@pytest.mark.parametrize("name", LOSSES)
def test_finite_target_is_healthy(examine, name):
    batch = {"x": normal(4, 8), "target": target(0.5)}
    report = examine(nn.Linear(8, 8), batch, loss=lambda out, batch: LOSSES[name](out.float(), batch["target"]))
    assert blamed(report) == ("healthy",)


class OwnLoss(nn.Module):
    """A model that is given the target as well and computes its loss; `mixed` is what its layer reads of both."""

    def __init__(self, loss, mixed=None):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.loss = loss
        self.mixed = mixed or (lambda x, target: x)

    def forward(self, x, target):
        out = self.layer(self.mixed(x, target)).float()
        return {"loss": self.loss(out, target), "out": out}


OWN_LOSSES = {
    "mse": F.mse_loss,
    "broadcast": lambda out, target: F.huber_loss(out[:, :6], target[:, 2:3].expand(-1, 6).double().float()),
    "logits": lambda out, target: F.binary_cross_entropy_with_logits(out[1:].flatten(), target[1:].flatten()),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_nan_target_that_the_model_itself_compares(examine, name):
    masked = lambda x, target: torch.where(target.isnan(), x, target)  # noqa: E731  looked at, and not let through
    report = examine(OwnLoss(OWN_LOSSES[name], masked), {"x": normal(4, 8), "target": target(math.nan)})
    assert blamed(report) == ("input", "", None, "poisoned-target")


def test_nan_target_that_the_layers_read_too_is_an_input(examine):
    report = examine(OwnLoss(F.mse_loss, torch.add), {"x": normal(4, 8), "target": target(math.nan)})
    assert blamed(report) == ("input", "", None, "poisoned-input")


def with_weight(value):
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight[0, 0] = value
    return nn.Sequential(layer)


def test_finite_weight_past_the_range_is_told_as_that(examine):
    report = examine(with_weight(1e6), {"input": normal(4, 8)})
    assert blamed(report) == ("state", "0", None, "poisoned-weights")
    assert "1,000,000" in report.cause.explanation
    assert "65,504" in report.cause.explanation
    assert "non-finite" not in report.cause.explanation


def test_large_weight_that_fits_is_healthy(examine):
    assert blamed(examine(with_weight(1e3), {"input": normal(4, 8)})) == ("healthy",)


class Gated(nn.Module):
    """Logarithms of a gate that is zero or one, gathered by a product with mostly zeros."""

    def __init__(self, product, floor):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.product = product
        self.floor = floor

    def forward(self, x):
        gate = (self.layer(x) > 0).float()
        return self.product(torch.eye(4), torch.log(gate.clamp(min=self.floor) if self.floor else gate))


PRODUCTS = {"matmul": torch.matmul, "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b)}


@pytest.mark.parametrize("op", PRODUCTS)
def test_zero_times_infinity_inside_a_product(examine, op):
    report = examine(Gated(PRODUCTS[op], 0.0), {"x": normal(4, 8)})
    assert blamed(report) == ("numerics", "", op, "indeterminate-form")
    assert "0 * inf" in report.cause.explanation


@pytest.mark.parametrize("op", PRODUCTS)
def test_product_without_infinities(examine, op):
    assert blamed(examine(Gated(PRODUCTS[op], 1e-3), {"x": normal(4, 8)})) == ("healthy",)


class Growth(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x):
        return torch.exp(self.layer(x).float().abs() * self.gain + self.gain)


def test_exponential_past_float64_has_no_question_mark(examine):
    report = examine(Growth(1000.0), {"x": normal(4, 8)})
    assert blamed(report) == ("numerics", "", "exp", "exp-overflow")
    assert "?" not in " ".join((report.cause.explanation, *(item.text for item in report.cause.evidence)))
    assert "too large even for float64" in report.cause.explanation
    assert blamed(examine(Growth(1.0), {"x": normal(4, 8)})) == ("healthy",)


IDLE = {
    "a row that no id asks for": (lambda: nn.Embedding(9, 4), "weight", {"x": torch.tensor([[0, 1, 2]])}),
    "running statistics in train mode": (lambda: nn.BatchNorm1d(4), "running_var", {"x": normal(5, 4)}),
    "a bias under a mask": (lambda: Masked(4, 4), "bias", {"x": normal(5, 4)}),
}


class Masked(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, :-1]


@pytest.mark.parametrize("value", [torch.nan, 1.0], ids=["nan", "finite"])
@pytest.mark.parametrize("kind", IDLE)
def test_state_that_the_step_does_not_suffer_from_is_told(examine, kind, value):
    make, name, batch = IDLE[kind]
    model = make()
    with torch.no_grad():
        getattr(model, name).view(-1)[-1] = value
    report = examine(model, batch)
    assert report.verdict == "healthy"
    assert sum(f"`{name}` in 1 of" in note for note in report.notes) == (value != 1.0)


class Statistics(nn.Module):
    """It keeps a moving deviation of its batches, and a mask that its first forward fills in."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(8, 4)
        self.register_buffer("deviation", torch.ones(4))
        self.register_buffer("mask", torch.zeros(4, 4))

    def forward(self, x):
        out = self.read(x)
        self.mask += torch.full((4, 4), -math.inf).triu(1)
        self.deviation.lerp_(out.detach().float().std(0), 0.1)
        return out


@pytest.mark.parametrize(("rows", "verdict"), [(1, "cannot-tell"), (3, "healthy")])
def test_a_buffer_that_the_step_spoils_is_told(examine, rows, verdict):
    report = examine(Statistics(), {"x": normal(rows, 8)}, inputs="x")
    assert report.verdict == verdict
    assert ("in the buffer `deviation`" in report.headline) == (verdict == "cannot-tell")


def test_a_buffer_that_overflows_is_told(examine):
    class Squares(Statistics):
        def forward(self, x):
            self.deviation += self.read(x).detach().float().mul(1e30).square().sum(0)
            return self.read(x)

    report = examine(Squares(), {"x": normal(3, 8)}, inputs="x")
    assert report.verdict == "cannot-tell"
    assert "Inf in the buffer `deviation`" in report.headline


@pytest.mark.parametrize(("weight", "verdict"), [(1e6, "precision"), (math.inf, "state")])
def test_a_weight_past_fp16_that_the_forward_hides(examine, weight, verdict):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Tanh())
    with torch.no_grad():
        model[0].weight[0, 0] = weight
    report = examine(model, {"x": normal(4, 8)}, loss=lambda out, _: out.square().mean())
    assert blamed(report) == (verdict, "0", None, "poisoned-weights")


class Scaled(nn.Module):
    """A norm whose eps fp16 loses, and a weight after it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        h = self.layer(x)
        return h / ((h * h).mean(-1, keepdim=True) + 1e-9).sqrt() * self.weight


def zero_norm(weight):
    model = Scaled()
    nn.init.zeros_(model.layer.bias)
    nn.init.constant_(model.weight, weight)
    return model, {"x": torch.zeros(4, 8)}


def test_nan_weights_come_before_a_failure_of_fp16_alone(examine):
    assert blamed(examine(*zero_norm(math.nan))) == ("state", "", None, "poisoned-weights")
    assert blamed(examine(*zero_norm(1.0))) == ("precision", "", "div", "eps-underflow")


def test_what_fails_in_fp32_comes_before_a_failure_of_fp16(examine):
    model, batch = zero_norm(1.0)
    report = examine(model, batch, loss=lambda out, batch: out.float().mean() + torch.log(batch["x"].mean() - 1.0))
    assert blamed(report) == ("numerics", "<loss>", "log", "invalid-domain")
    assert [found.cause.code for found in report.also] == ["eps-underflow"]
