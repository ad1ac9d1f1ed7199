"""A step that rounding keeps finite and fp32 does not is no healthy one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn


class Third(nn.Module):
    """A ratio whose divisor is zero in fp32, and a rounding error of fp16 in fp16."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.scale.weight, 1 / 3)

    def forward(self, x):
        return self.ratio(self.scale(x))

    def ratio(self, third):
        return 1 / (third.float() - 1 / 3)


class BehindMask(Third):
    """The same, behind infinities that are meant."""

    def forward(self, x):
        hidden = torch.tensor([[0.0, 1.0]]).log().softmax(-1)
        return self.ratio(self.scale(x)) * hidden.sum()


class WithoutRatio(Third):
    def ratio(self, third):
        return third.float() - 1 / 3


@pytest.mark.parametrize("model", [Third, BehindMask])
def test_an_output_that_is_infinite_in_fp32(examine, model):
    report = examine(model(), {"x": torch.ones(2, 1)})
    assert report.verdict == "cannot-tell"
    headline = "The step is finite under fp16 autocast but non-finite in fp32, because of reciprocal ("
    assert report.headline.startswith(headline)
    assert not report.fixes


def test_a_loss_that_is_infinite_in_fp32(examine):
    report = examine(WithoutRatio(), {"x": torch.ones(2, 1)}, loss=lambda output, _: output.abs().log().mean())
    assert report.verdict == "cannot-tell"
    assert "non-finite in fp32, because of log (" in report.headline


def test_fp32_that_rounds_as_finitely_is_healthy(examine):
    assert examine(Third(), {"x": torch.full((2, 1), math.pi)}).verdict == "healthy"
