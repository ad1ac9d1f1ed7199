"""An eps that Python folds into the number one before torch sees it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strangers.visits import blamed, normal


class Evidence(nn.Module):
    """The logarithm of what a saturated probability leaves, kept off zero by a factor or a term beside one."""

    def __init__(self, rest):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.rest = rest

    def forward(self, x):
        return torch.log(self.rest(torch.sigmoid(self.layer(x).abs() * 20)))


FOLDED = {"mul": lambda p, eps: 1 - p * (1 - eps), "rsub": lambda p, eps: (1 + eps) - p}
in_both_ways = pytest.mark.parametrize("op", FOLDED)


@in_both_ways
def test_eps_that_fp16_loses_beside_one(examine, op):
    report = examine(Evidence(lambda p: FOLDED[op](p, 1e-5)), {"x": normal(4, 8)})
    assert blamed(report) == ("precision", "", "log", "eps-underflow")
    assert f"used by {op} in fp16" in report.cause.evidence[0].text


@in_both_ways
def test_eps_that_fp16_keeps_beside_one(examine, op):
    assert blamed(examine(Evidence(lambda p: FOLDED[op](p, 1e-2)), {"x": normal(4, 8)})) == ("healthy",)


@in_both_ways
def test_audit_sees_the_folded_eps(examine, op):
    report = examine(Evidence(lambda p: FOLDED[op](p, 1e-5)), {"x": normal(4, 8)})
    (use,) = [use for use in report.eps_audit if use.op == op]
    assert (use.value, use.rounded, use.effect) == (pytest.approx(1e-5), 0.0, "zero")
    assert use.name == ("1 - other" if op == "mul" else "other - 1")


def test_factor_that_guards_nothing_is_no_eps(examine):
    class Decay(nn.Module):
        def forward(self, x):
            return x * 0.9999

    assert examine(Decay(), {"x": normal(4, 8)}).eps_audit == ()


BOUNDED = {
    "a logarithm": lambda p: torch.log(1 - p.clamp(1e-8, 1 - 1e-8)),
    "an arc": lambda p: torch.atanh(p.clamp(-1 + 1e-15, 1 - 1e-15)),
    "a derivative": lambda p: torch.acos(p.clamp(max=1 - 1e-8)),
    "zero itself": lambda p: torch.log((p - 1).abs() + 1e-50),
}


@pytest.mark.parametrize("way", BOUNDED)
def test_eps_that_fp32_loses_as_well(examine, way):
    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return BOUNDED[way](x + self.shift)

    x = torch.tensor([[0.5, 1.0], [0.2, 0.1]])
    report = examine(Bounded(), {"x": x}, amp_dtype="bfloat16", loss=lambda output, _: output.sum())
    assert (report.verdict, report.cause.code) == ("numerics", "eps-underflow")
    assert "in fp32" in report.headline
    assert report.headline.startswith(("1e-8 is lost beside 1", "1e-15 is lost beside 1", "1e-50 rounds to 0"))


UNGUARDED = {
    "another eps": lambda x: torch.log(1 - x.clamp(max=1.0)) + torch.log(x + 1e-8),
    "the other end": lambda x: torch.log(x.clamp(0, 1 - 1e-8)),
}


@pytest.mark.parametrize("way", UNGUARDED)
def test_a_zero_that_no_eps_guards_is_no_eps(examine, way):
    class Bare(nn.Module):
        def forward(self, x):
            return UNGUARDED[way](x)

    report = examine(Bare(), {"x": torch.tensor([[0.0, 1.0]])})
    assert blamed(report) == ("numerics", "", "log", "log-of-zero")
