"""Numbers that torch refuses to write into a half-precision tensor: the step ends with an error, not with a NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nandoctor.errors import ModelError
from strangers.visits import Between, blamed, line, normal


class Attends(nn.Module):
    """Scores of tokens against tokens, hidden by anything, and the mean that they weigh."""

    def __init__(self, hide):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.hide = hide

    def forward(self, x):
        scores = self.query(x) @ x.transpose(-1, -2)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return self.hide(scores, later).softmax(-1) @ x


def in_place(scores, later):
    scores = scores.clone()
    scores.masked_fill_(later, -1e9)
    return scores


REFUSED = {
    "masked_fill": lambda scores, later: scores.masked_fill(later, torch.finfo(torch.float32).min),
    "full_like": lambda scores, later: torch.where(later, torch.full_like(scores, -1e20), scores),
    "pad": lambda scores, later: F.pad(scores, (0, 1), value=-1e6)[..., :-1],
}


@pytest.mark.parametrize("op", REFUSED)
def test_a_mask_value_that_torch_refuses(examine, op):
    report = examine(Attends(REFUSED[op]), {"x": normal(2, 5, 8)})
    assert blamed(report) == ("precision", "", op, "mask-constant-overflow")
    assert "raises an error rather than write -inf" in report.cause.explanation


def test_a_mask_value_that_torch_refuses_in_place(examine):
    report = examine(Attends(in_place), {"x": normal(2, 5, 8)})
    assert blamed(report) == ("precision", "", "masked_fill", "mask-constant-overflow")
    assert line(report) == "scores.masked_fill_(later, -1e9)"


@pytest.mark.parametrize("value", [-1e4, -65504.0, float("-inf")])
def test_a_mask_value_that_fits_or_is_meant(examine, value):
    report = examine(Attends(lambda scores, later: scores.masked_fill(later, value)), {"x": normal(2, 5, 8)})
    assert blamed(report) == ("healthy",)


def test_the_same_value_in_bf16(examine):
    report = examine(Attends(in_place), {"x": normal(2, 5, 8)}, amp_dtype="bfloat16")
    assert blamed(report) == ("healthy",)


def test_a_bound_that_torch_refuses_and_that_hides_nothing(examine):
    model = Attends(lambda scores, later: scores.clamp(min=-1e9))
    with pytest.raises(ModelError, match="without overflow") as caught:
        examine(model, {"x": normal(2, 5, 8)})
    assert "torch.finfo(x.dtype)" in caught.value.remedy


@pytest.mark.parametrize("accepts", [True, False], ids=["any", "half alone"])
def test_code_that_takes_half_alone_is_told_of_the_reference(examine, accepts):
    class Kernel(nn.Module):
        def forward(self, x):
            if not accepts and x.dtype is not torch.float16:
                raise TypeError("this kernel takes half")
            return x * 1e6

    if accepts:
        assert examine(Between(Kernel()), {"x": normal(3, 8)}).verdict == "precision"
    else:
        with pytest.raises(ModelError, match=r"this kernel takes half \(in fp32, which nandoctor compares with\)"):
            examine(Between(Kernel()), {"x": normal(3, 8)})
