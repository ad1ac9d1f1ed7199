"""A mask's constant that becomes -inf beside a real overflow: the overflow is to blame."""

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
TOKENS = {"tokens": torch.tensor([[[1.0] * 4, [-1.0] * 4, [1.0] * 4]]), "keep": torch.tensor([[[1.0, 1.0, 0.0]]])}


@rows(
    "* * matmul matmul-overflow",
    TOKENS,
    40.0,
    also=("mask-constant-overflow",),
    holds=lambda report: report.chain[0].op == "matmul",
)
@rows("healthy", TOKENS, 1.0)
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


def with_a_row(*kept):
    """The second sample's first column is hidden, and all but what is kept of the first one's second row."""
    keep = torch.ones(2, 3, 3)
    keep[0, 1], keep[1, :, 0] = torch.tensor(kept), 0.0
    return {"tokens": normal(2, 3, 4), "keep": keep}


def bounds_the_value(report):
    return not report.fixes or any(fix.verified and "-10000" in fix.patch for fix in report.fixes)


@rows(
    "precision * * mask-constant-overflow",
    with_a_row(0.0, 0.0, 0.0),
    -1e9,
    says=("The mask value -1e9 becomes -Inf in fp16",),
    holds=bounds_the_value,
)
@rows("numerics * * fully-masked-softmax", with_a_row(0.0, 0.0, 0.0), float("-inf"), name="as it was written")
@rows("healthy", with_a_row(1.0, 0.0, 0.0), -1e9, name="beside others")
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
