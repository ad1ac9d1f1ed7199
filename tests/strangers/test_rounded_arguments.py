"""Arguments that low precision rounds onto a singular point: the range of the format has nothing to do with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strangers.visits import blamed, normal


class Angle(nn.Module):
    """The angle between two vectors, their cosine from a product that autocast runs in low precision."""

    def __init__(self, function, apart):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.function = function
        self.apart = apart

    def forward(self, x):
        one = nn.functional.normalize(self.layer(x).float(), dim=-1)
        other = nn.functional.normalize(one + self.apart * one.roll(1, -1), dim=-1)
        cosine = torch.bmm(one[:, None], other[:, :, None]).flatten()
        return self.function(cosine.float())


def mean(output, _batch):
    return output.mean()


@pytest.mark.parametrize("amp_dtype", ["float16", "bfloat16"])
def test_cosine_that_rounds_to_one_before_acos(examine, amp_dtype):
    report = examine(Angle(torch.acos, 0.01), {"x": normal(4, 16)}, loss=mean, amp_dtype=amp_dtype)
    assert blamed(report) == ("precision", "", "acos", "gradient-singularity")
    assert "exactly 1" in report.cause.explanation


def test_cosine_that_rounds_to_one_before_atanh(examine):
    report = examine(Angle(torch.atanh, 0.01), {"x": normal(4, 16)}, loss=mean)
    assert blamed(report) == ("precision", "", "atanh", "invalid-domain")
    assert "rounding to fp16" in report.cause.explanation


@pytest.mark.parametrize("function", [torch.acos, torch.atanh])
def test_cosine_that_stays_below_one(examine, function):
    assert blamed(examine(Angle(function, 0.8), {"x": normal(4, 16)}, loss=mean)) == ("healthy",)


class Saturated(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x):
        return torch.log1p(-torch.sigmoid(self.layer(x).abs() * self.gain))


def test_argument_of_log1p_is_told_as_it_is(examine):
    report = examine(Saturated(10.0), {"x": normal(4, 8)})
    assert blamed(report) == ("precision", "", "log1p", "log-of-zero")
    assert "exactly -1" in report.cause.explanation
    assert not any("zero" in item.text for item in report.cause.evidence)


def test_probability_that_fp16_keeps_below_one(examine):
    assert blamed(examine(Saturated(1.0), {"x": normal(4, 8)})) == ("healthy",)


class Sampled(nn.Module):
    """Casts a standard deviation, which it computes in fp32, back to the format of the mean."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, x):
        mean, spread = self.layer(x).chunk(2, -1)
        return mean + (spread + 30.0).exp().to(mean.dtype)


def test_a_cast_of_ones_own_is_told_as_such(examine):
    report = examine(Sampled(), {"x": normal(4, 16)})
    assert report.cause.code == "input-cast-overflow"
    assert report.cause.explanation.startswith("The line casts `(spread + 30.0).exp()` to fp16")
