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
