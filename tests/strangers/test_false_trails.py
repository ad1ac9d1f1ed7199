"""Right places with a wrong cause in plain sight: an eps, a constant, an exponential that are all innocent."""

from __future__ import annotations

import torch
from torch import nn

from strangers.visits import Between, blamed, louder, normal


def test_a_saturated_sigmoid_behind_a_norm_with_its_eps(examine):
    class Saturated(nn.Module):
        def forward(self, x):
            centred = x - x.mean(-1, keepdim=True)
            unit = centred / ((centred * centred).mean(-1, keepdim=True) + 1e-8).sqrt()
            return torch.log(1 - torch.sigmoid(6 * unit))

    report = examine(Between(Saturated()), {"x": normal(30, 8)})
    assert blamed(report) == ("precision", "middle", "log", "log-of-zero")


def test_a_convolution_over_a_blank_image(examine):
    model = nn.Sequential(louder(nn.Conv2d(3, 4, 5), 3e3), nn.BatchNorm2d(4))
    with torch.no_grad():
        model[0].weight.abs_()
    report = examine(model, {"image": torch.full((2, 3, 8, 8), 100.0)})
    assert blamed(report) == ("precision", "0", "conv2d", "matmul-overflow")


def test_a_large_activation_times_an_exponential_near_one(examine):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_gain = nn.Parameter(torch.full((8,), 0.5))

        def forward(self, x):
            return (6e4 * torch.sigmoid(x + 9)) * self.log_gain.exp().to(x.dtype)

    report = examine(Between(Gate()), {"x": normal(30, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")


def test_a_large_negative_constant_that_is_no_mask(examine):
    class Penalty(nn.Module):
        def forward(self, x):
            return x * -3e4

    report = examine(Between(Penalty()), {"x": 10 + normal(30, 8)})
    assert blamed(report)[1:] == ("middle", "mul", "elementwise-overflow")


def test_a_mask_that_fits_beside_scores_that_do_not(examine):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = louder(nn.Linear(8, 8), 300.0)

        def forward(self, x):
            scores = self.query(x) @ x.transpose(-1, -2)
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x

    report = examine(Between(Attention()), {"x": 30 * normal(2, 6, 8)})
    assert blamed(report) == ("precision", "middle", "matmul", "matmul-overflow")
