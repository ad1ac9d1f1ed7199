"""Whole numbers: counts below the line, positions and times that are too large, results that an op writes to."""

from __future__ import annotations

import torch
from torch import nn

from strangers.rows import HEALTHY, Expect, Row
from strangers.visits import normal


class Lifted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.lift(x), x)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, ids):
        return ids.half() * self.gain


def into_scratch(h, x):
    scratch = torch.full_like(h, float("nan"))
    torch.mul(h, 3e6, out=scratch)
    return scratch


def lifted(name, function, expect):
    return Row(name, lambda: Lifted(function), {"x": normal(4, 8)}, expect)


DIVISION = Expect("numerics", "", "div", "division-by-zero")

ROWS = [
    lifted("sum over no element", lambda h, x: h.sum() / (x > 100).sum(), DIVISION),
    lifted("count from Python", lambda h, x: h.sum(0) / (len(x) - 4), DIVISION),
    lifted("count as a tensor", lambda h, x: h.sum(0) / torch.tensor([len(x) - 4]), DIVISION),
    lifted(
        "root of no element",
        lambda h, x: h * torch.rsqrt((x > 100).sum(0)),
        Expect("numerics", "", "rsqrt", "division-by-zero"),
    ),
    lifted(
        "log of no element",
        lambda h, x: h + torch.log((x > 100).sum(0)),
        Expect("numerics", "", "log", "log-of-zero"),
    ),
    lifted("count of at least one", lambda h, x: h.sum() / (x > 100).sum().clamp(min=1), HEALTHY),
    Row(
        "position that fp16 cannot hold",
        Positions,
        {"ids": torch.tensor([[70000, 2], [3, 4]])},
        Expect("precision", "", "to", "input-cast-overflow", samples=(0,)),
    ),
    lifted(
        "memory that an op is told to write to",
        into_scratch,
        Expect("precision", "", "mul", "elementwise-overflow", line="torch.mul(h, 3e6, out=scratch)"),
    ),
]
