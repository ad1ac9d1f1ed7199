"""Products with beta=0 do not read what they are added to: memory as it lies there is no evidence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from strangers.visits import blamed, normal


class Scores(nn.Module):
    """Attention scores as older code writes them: baddbmm into memory that holds anything."""

    def __init__(self, gain, beta):
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.register_buffer("gain", torch.tensor(gain), persistent=False)
        self.beta = beta

    def forward(self, x):
        query = self.query(x) * self.gain
        memory = torch.full((len(x), x.shape[1], x.shape[1]), math.nan, dtype=query.dtype)
        scores = torch.baddbmm(memory, query, query.mT, beta=self.beta)
        return scores.softmax(-1) @ x


def test_nan_that_is_not_read_is_innocent(examine):
    assert blamed(examine(Scores(1.0, beta=0), {"x": normal(2, 5, 16)})) == ("healthy",)


def test_overflow_beside_it_is_found(examine):
    report = examine(Scores(1e3, beta=0), {"x": normal(2, 5, 16)})
    assert blamed(report) == ("precision", "", "baddbmm", "matmul-overflow")
    assert "absmax_batch1" in {item.name for item in report.cause.evidence}
    assert not report.also


def test_nan_that_is_read_is_found(examine):
    report = examine(Scores(1.0, beta=1), {"x": normal(2, 5, 16)})
    assert report.verdict == "numerics"
    assert report.origin.elements.kinds == ("nan",)


@pytest.mark.parametrize("name", ["addmm", "addmv", "addr", "addbmm"])
def test_other_products_with_beta_zero(examine, name):
    shapes = {
        "addmm": [(3, 4), (4, 3)],
        "addmv": [(3, 4), (4,)],
        "addr": [(3,), (3,)],
        "addbmm": [(2, 3, 4), (2, 4, 3)],
    }

    class Net(nn.Module):
        def forward(self, x):
            factors = [x.mean() * torch.ones(shape) for shape in shapes[name]]
            memory = torch.full((3,) if name == "addmv" else (3, 3), math.nan)
            return getattr(torch, name)(memory.to(torch.float16), *factors, beta=0)

    assert blamed(examine(Net(), {"x": normal(2, 5)})) == ("healthy",)
