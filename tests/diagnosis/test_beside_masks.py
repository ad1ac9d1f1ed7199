"""Infinities that an op makes of finite values while others, of a mask, pass through it."""

import math

import pytest
import torch
from torch import nn

import nandoctor


def masked(x):
    return x.masked_fill(torch.tensor([False, False, True]), -math.inf)


CASES = {
    "below zero": (lambda x: torch.sqrt((x - 2).masked_fill(x > 2, math.inf)).clamp(max=9), "sqrt", "invalid-domain"),
    "beyond float64": (lambda x: torch.exp(masked(x) * 400).sum(-1), "exp", "exp-overflow"),
    "in base 2": (lambda x: torch.exp2(masked(x) * 600).sum(-1), "exp2", "exp-overflow"),
    "a divisor of zero": (lambda x: (masked(x) / (x - x[:1])).softmax(-1), "div", "division-by-zero"),
    "out of the domain": (lambda x: masked(x) * torch.atanh(masked(x).exp() / math.e**2), "atanh", "invalid-domain"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_finite_is_blamed_and_not_the_mask(case, tmp_path):
    function, op, cause = CASES[case]

    class Net(nn.Module):
        def forward(self, x):
            return function(x)

    torch.save({"state_dict": {}, "x": torch.tensor([[1.0, 2.0, 3.0], [0.5, 2.0, 1.0]])}, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", Net(), fixes=False).report
    assert (report.origin.op, report.cause.code) == (op, cause)
