"""A mask's constant that becomes -inf beside a real overflow: the overflow is to blame."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Scores before scaling, under an additive mask of -1e9 that leaves every query something to look at."""

    def __init__(self, size):
        super().__init__()
        self.embed = nn.Linear(4, 8, bias=False)
        nn.init.constant_(self.embed.weight, size)

    def forward(self, tokens, keep):
        hidden = self.embed(tokens)
        scores = hidden @ hidden.mT
        mask = torch.where(keep > 0, 0.0, -1e9).to(scores.dtype)
        return (scores + mask).softmax(-1) @ hidden


def batch():
    tokens = torch.ones(1, 3, 4)
    tokens[0, 1] = -1
    return {"tokens": tokens, "keep": torch.tensor([[[1.0, 1.0, 0.0]]])}


def test_a_partial_mask_is_not_blamed_for_the_scores(examine):
    report = examine(Attention(40.0), batch())
    assert (report.origin.op, report.cause.code) == ("matmul", "matmul-overflow")
    assert report.chain[0].op == "matmul"
    assert [other.cause.code for other in report.also] == ["mask-constant-overflow"]


def test_a_partial_mask_alone_is_healthy(examine):
    assert examine(Attention(1.0), batch()).verdict == "healthy"


class ConstantTensor(nn.Module):
    """Scores under a mask value that is made as a tensor of their own dtype, by no op that is traced."""

    def __init__(self, value):
        super().__init__()
        self.value, self.embed = value, nn.Linear(4, 8)

    def forward(self, tokens, keep):
        hidden = self.embed(tokens)
        scores = hidden @ hidden.mT
        mask = torch.tensor(self.value, dtype=scores.dtype)
        return torch.where(keep > 0, scores, mask).softmax(-1) @ hidden


def with_a_masked_row():
    keep = torch.ones(2, 3, 3)
    keep[0, 1], keep[1, :, 0] = 0.0, 0.0
    return {"tokens": torch.randn(2, 3, 4), "keep": keep}


def test_a_constant_tensor_that_does_not_fit_is_named(examine):
    report = examine(ConstantTensor(-1e9), with_a_masked_row())
    assert (report.verdict, report.cause.code) == ("precision", "mask-constant-overflow")
    assert report.headline.startswith("The mask value -1e9 becomes -Inf in fp16")
    if report.fixes:
        assert any(fix.verified and "-10000" in fix.patch for fix in report.fixes)


def test_a_constant_tensor_of_infinity_is_as_it_was_written(examine):
    report = examine(ConstantTensor(float("-inf")), with_a_masked_row())
    assert (report.verdict, report.cause.code) == ("numerics", "fully-masked-softmax")


def test_a_constant_that_does_not_fit_beside_others_is_harmless(examine):
    batch = with_a_masked_row()
    batch["keep"][0, 1] = torch.tensor([1.0, 0.0, 0.0])
    assert examine(ConstantTensor(-1e9), batch).verdict == "healthy"
