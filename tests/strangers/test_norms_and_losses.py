"""Normalisations at their singular points, losses written by hand, gradients that are meant to be hidden."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, normalize

from strangers.visits import Between, blamed, normal

HEALTHY = ("healthy",)


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, image):
        return self.norm(self.look(image)).relu()


@pytest.mark.parametrize(
    ("variance", "eps", "found"),
    [
        (1.0, 0.0, HEALTHY),
        (0.0, 1e-5, HEALTHY),
        (0.0, 0.0, ("numerics", "norm", "batch_norm", "division-by-zero")),
        (-1.0, 1e-5, ("numerics", "norm", "batch_norm", "invalid-domain")),
        (math.nan, 1e-5, ("state", "norm", None, "poisoned-buffers")),
    ],
)
def test_a_running_variance(examine, variance, eps, found):
    model = Pixels()
    model.norm.running_var.fill_(variance)
    model.norm.eps = eps
    assert blamed(examine(model, {"image": normal(2, 3, 8, 8)}, mode="eval")) == found


@pytest.mark.parametrize("norm", [nn.LayerNorm(8, eps=0.0), nn.GroupNorm(2, 8, eps=0.0)])
def test_a_norm_without_eps_of_something_constant(examine, norm):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(0 * x)

    report = examine(Between(Constant()), {"x": normal(4, 8)})
    assert (report.verdict, report.origin.place.module, report.cause.code) == (
        "numerics",
        "middle.norm",
        "division-by-zero",
    )


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: torch.polygamma(1, x.float().relu()), "polygamma"),
        (lambda x: torch.special.zeta(x.float().sign(), 2.0), "special_zeta"),
        (lambda x: torch.digamma(x.float().relu()), "digamma"),
    ],
    ids=["polygamma", "zeta", "digamma"],
)
def test_poles(examine, function, op):
    class Pole(nn.Module):
        def forward(self, x):
            return function(x)

    assert blamed(examine(Between(Pole()), {"x": normal(4, 8)})) == ("numerics", "middle", op, "invalid-domain")


def test_a_product_that_even_float64_cannot_hold(examine):
    class Likelihood(nn.Module):
        def forward(self, x):
            return torch.prod(1e30 * (1 + x.float().abs()), -1, keepdim=True).expand_as(x)

    report = examine(Between(Likelihood(), width=64), {"x": normal(4, 64)})
    assert blamed(report)[1:] == ("middle", "prod", "reduction-overflow")


class Rows(nn.Module):
    """Some of the values are exactly zero, and have gradients."""

    def __init__(self, function):
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function((self.lift(x).float() * torch.tensor([0.0, 1.0] * 4)).abs())


@pytest.mark.parametrize(
    ("function", "op", "causes"),
    [
        (lambda x: torch.where(x > 0, x.sqrt(), 0.0), "sqrt", {"where-gradient-trap"}),
        (lambda x: x.log().masked_fill(x <= 0, 0.0), "log", {"where-gradient-trap"}),
        (lambda x: (x**0.5) * (x > 0), "pow", {"where-gradient-trap", "gradient-singularity"}),
        (lambda x: x.sqrt()[x > 0], "sqrt", {"where-gradient-trap", "gradient-singularity"}),
        (lambda x: x.log().clamp(min=-10), "log", {"where-gradient-trap", "gradient-singularity"}),
        (lambda x: x.sum(-1).mul(0).sqrt(), "sqrt", {"gradient-singularity"}),
    ],
)
def test_what_is_hidden_after_the_fact_has_a_gradient(examine, function, op, causes):
    report = examine(Rows(function), {"x": normal(4, 8)}, loss=lambda output, _: output.mean())
    assert (report.verdict, report.origin.place.module, report.origin.op) == ("numerics", "", op)
    assert report.cause.code in causes


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0),
        lambda x: x.clamp(min=1e-6).log(),
        lambda x: x[x > 0].sqrt(),
        lambda x: torch.linalg.vector_norm(0 * x, dim=-1),
        lambda x: normalize(0 * x, dim=-1),
        lambda x: torch.cumprod(x, -1),
    ],
)
def test_what_is_made_safe_before_is_healthy(examine, function):
    report = examine(Rows(function), {"x": normal(4, 8)}, loss=lambda output, _: output.mean())
    assert blamed(report) == HEALTHY


def test_a_hook_of_the_users_that_spoils_a_gradient(examine):
    class Hooked(Rows):
        def forward(self, x):
            lifted = self.lift(x)
            lifted.register_hook(lambda gradient: gradient * math.inf)
            return lifted

    report = examine(Hooked(None), {"x": normal(4, 8)}, loss=lambda output, _: output.float().mean())
    assert (report.verdict, report.origin.phase, report.origin.place.module) == ("numerics", "backward", "lift")
    assert report.headline.endswith("a hook of that tensor did, or the sum of several gradients")


@pytest.mark.parametrize(
    "hook",
    [
        lambda module, gradients, _: (gradients[0] / (gradients[0] - gradients[0]),),
        lambda module, gradients, _: (gradients[0] * math.inf,),
        lambda module, gradients, _: (torch.log(-gradients[0].abs()),),
    ],
    ids=["0/0", "inf", "log"],
)
def test_a_backward_hook_of_a_module(examine, hook):
    """Torch runs it in a custom Function of its own, whose line and name say nothing."""
    model = Between(nn.Linear(8, 8))
    model.middle.register_full_backward_hook(hook)
    report = examine(model, {"x": normal(4, 8)}, loss=lambda output, _: output.float().mean())
    assert report.verdict == "numerics"
    assert report.headline == "A backward hook of middle turns finite gradients into non-finite ones"
    assert report.cause is None


@pytest.mark.parametrize(
    ("scale", "amp_dtype", "told"), [(None, "float16", 1), (None, "bfloat16", 0), (8.0, "float16", 0)]
)
def test_gradients_without_a_loss_scale_are_told_as_such(examine, scale, amp_dtype, told):
    options = {"loss": lambda output, _: output.float().mean(), "loss_scale": scale, "amp_dtype": amp_dtype}
    report = examine(Between(nn.ReLU()), {"x": normal(4, 8)}, **options)
    assert blamed(report) == HEALTHY
    assert sum("--loss-scale" in note for note in report.notes) == told


def test_a_loss_that_autocast_refuses_was_computed_outside_of_it(examine):
    def loss(output, batch):
        return binary_cross_entropy(output.float().sigmoid(), batch["label"])

    batch = {"x": normal(4, 8), "label": torch.ones(4, 2)}
    assert blamed(examine(Between(nn.ReLU()), batch, loss=loss, inputs="x")) == HEALTHY


def test_a_gradient_that_fp16_cannot_take_back(examine):
    """The loss is computed in fp32, and its gradient is cast on the way back: in fp32 there is no such cast."""

    def loss(output, _):
        return output.float().sum() * 1e5

    report = examine(Between(nn.ReLU()), {"x": normal(4, 8)}, loss=loss)
    assert blamed(report) == ("precision", "<loss>", "to", "gradient-overflow")


class Bounded(nn.Module):
    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def forward(self, x):
        return torch.atanh(torch.tanh(6 * x).clamp(-self.bound, self.bound))


@pytest.mark.parametrize(
    ("bound", "found"), [(1 - 1e-3, HEALTHY), (1 - 1e-5, ("precision", "middle", "atanh", "eps-underflow"))]
)
def test_a_bound_that_fp16_rounds_to_one(examine, bound, found):
    assert blamed(examine(Between(Bounded(bound)), {"x": 3 * normal(4, 8)})) == found


def test_a_divisor_that_fp16_rounds_to_zero_is_told_in_fp32(examine):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 4)
            nn.init.constant_(self.gate.bias, -20)

        def forward(self, x):
            return x / torch.sigmoid(self.gate(x))

    report = examine(Gated(), {"x": normal(3, 4)})
    assert blamed(report) == ("precision", "", "div", "division-by-zero")
    assert re.search(r"is 0 in 12 elements \(at least [\d.]+e-\d+ in fp32\)$", report.headline)
    assert "; in fp32 none is, and the smallest is " in report.cause.explanation
