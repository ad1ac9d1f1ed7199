"""Whole numbers: counts below the line, positions and times that are too large, results that an op writes to."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from visits import blamed, line, normal

HEALTHY = ("healthy",)


class Lifted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.lift(x), x)


@pytest.mark.parametrize(
    ("function", "op", "cause"),
    [
        (lambda h, x: h.sum() / (x > 100).sum(), "div", "division-by-zero"),
        (lambda h, x: h.sum(0) / (len(x) - 4), "div", "division-by-zero"),
        (lambda h, x: h.sum(0) / torch.tensor([len(x) - 4]), "div", "division-by-zero"),
        (lambda h, x: h * torch.rsqrt((x > 100).sum(0)), "rsqrt", "division-by-zero"),
        (lambda h, x: h + torch.log((x > 100).sum(0)), "log", "log-of-zero"),
    ],
)
def test_a_count_of_nothing(examine, function, op, cause):
    assert blamed(examine(Lifted(function), {"x": normal(4, 8)})) == ("numerics", "", op, cause)


def test_a_count_of_at_least_one_is_healthy(examine):
    model = Lifted(lambda h, x: h.sum() / (x > 100).sum().clamp(min=1))
    assert blamed(examine(model, {"x": normal(4, 8)})) == HEALTHY


def test_a_position_that_fp16_cannot_hold(examine):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))

        def forward(self, ids):
            return ids.half() * self.gain

    report = examine(Positions(), {"ids": torch.tensor([[70000, 2], [3, 4]])})
    assert blamed(report)[1:] == ("", "to", "input-cast-overflow")
    assert report.origin.elements.samples == (0,)


def test_memory_that_an_op_is_told_to_write_to(examine):
    def into_scratch(h, x):
        scratch = torch.full_like(h, float("nan"))
        torch.mul(h, 3e6, out=scratch)
        return scratch

    report = examine(Lifted(into_scratch), {"x": normal(4, 8)})
    assert blamed(report) == ("precision", "", "mul", "elementwise-overflow")
    assert line(report) == "torch.mul(h, 3e6, out=scratch)"
