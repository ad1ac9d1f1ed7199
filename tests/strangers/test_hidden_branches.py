"""Gradients through what the forward hides: selections after the fact, infinities that a division swallows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strangers.visits import blamed, normal


class Head(nn.Module):
    """A layer, and anything after it; `keep` makes exact zeros of its negative outputs."""

    def __init__(self, then, keep=True):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.then = then
        self.keep = keep

    def forward(self, x):
        h = self.layer(x)
        return self.then(h * (h > 0) if self.keep else h.abs() + 0.1)


def mean(output, _batch):
    return output.float().mean()


SELECTIONS = {
    "log": lambda h: torch.log(h).nan_to_num(neginf=0.0),
    "sqrt": lambda h: torch.sqrt(h)[h > 0],
    "pow": lambda h: (h**0.5).clamp(min=0.05),
    "div": lambda h: (h / (h * h)).nan_to_num(0.0),
    "rsqrt": lambda h: torch.rsqrt(h).masked_fill(h == 0, 0.0),
}


@pytest.mark.parametrize("op", SELECTIONS)
def test_selection_behind_a_singular_op(examine, op):
    report = examine(Head(SELECTIONS[op]), {"x": normal(4, 8)}, loss=mean)
    assert blamed(report) == ("numerics", "", op, "where-gradient-trap")
    assert report.origin.phase == "backward"


@pytest.mark.parametrize("op", SELECTIONS)
def test_selection_with_nothing_to_hide(examine, op):
    report = examine(Head(SELECTIONS[op], keep=False), {"x": normal(4, 8)}, loss=mean)
    assert blamed(report) == ("healthy",)


def test_root_of_zero_without_a_selection(examine):
    report = examine(Head(torch.sqrt), {"x": normal(4, 8)}, loss=mean)
    assert blamed(report) == ("numerics", "", "sqrt", "gradient-singularity")


class Damped(nn.Module):
    """x / (1 + exp(x * gain)): the quotient is 0 where the exponential is infinite."""

    def __init__(self, gain):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x):
        h = self.layer(x).float()
        return h / (1 + torch.exp(h * self.gain))


def test_infinity_that_only_the_backward_meets(examine):
    report = examine(Damped(2000.0), {"x": normal(4, 8)}, loss=mean)
    assert blamed(report) == ("numerics", "", "exp", "exp-overflow")
    assert report.origin.phase == "forward"
    assert "hides that Inf" in report.cause.explanation


def test_exponential_that_fits_is_healthy(examine):
    assert blamed(examine(Damped(20.0), {"x": normal(4, 8)}, loss=mean)) == ("healthy",)


@pytest.mark.parametrize(
    "then", [lambda h: 2 * torch.sqrt(h), lambda h: torch.relu(1 - torch.sqrt(h)).square()], ids=["doubled", "limited"]
)
def test_what_hides_nothing_is_not_blamed(examine, then):
    report = examine(Head(then), {"x": normal(4, 8)}, loss=mean)
    assert blamed(report) == ("numerics", "", "sqrt", "gradient-singularity")


class Rooted(nn.Module):
    """The root of a relu: its infinite derivative at 0 meets relu's zero, and is replaced."""

    def __init__(self, shift):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shift = shift

    def forward(self, x):
        return torch.sqrt(torch.relu(self.layer(x)) + self.shift)


def test_gradient_that_relu_removes_is_healthy_and_noted(examine):
    report = examine(Rooted(0.0), {"x": normal(4, 8)}, loss=mean)
    assert blamed(report) == ("healthy",)
    (note,) = [note for note in report.notes if "detect_anomaly" in note]
    assert "sqrt" in note
    assert "test_hidden_branches.py:" in note


def test_nothing_is_noted_where_nothing_was_removed(examine):
    report = examine(Rooted(1e-2), {"x": normal(4, 8)}, loss=mean)
    assert not any("detect_anomaly" in note for note in report.notes)
