"""A step that rounding keeps finite and fp32 does not is no healthy one."""

import math

import torch
from torch import nn

from strangers.rows import Rows

rows = Rows()
ONES = {"x": torch.ones(2, 1)}
BECAUSE = "The step is finite under fp16 autocast but non-finite in fp32, because of {} ("


def no_fix(report):
    return not report.fixes


@rows("cannot-tell", ONES, says=(BECAUSE.format("reciprocal"),), holds=no_fix)
@rows("healthy", {"x": torch.full((2, 1), math.pi)}, name="fp32 that rounds as finitely")
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


@rows("cannot-tell", ONES, says=(BECAUSE.format("reciprocal"),), holds=no_fix)
class BehindMask(Third):
    """The same, behind infinities that are meant."""

    def forward(self, x):
        hidden = torch.tensor([[0.0, 1.0]]).log().softmax(-1)
        return self.ratio(self.scale(x)) * hidden.sum()


@rows("cannot-tell", ONES, says=("non-finite in fp32, because of log (",), loss=lambda out, _: out.abs().log().mean())
class WithoutRatio(Third):
    def ratio(self, third):
        return third.float() - 1 / 3
