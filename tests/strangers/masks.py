"""A mask's constant that becomes -inf beside a real overflow, or that torch refuses to write."""

import torch
import torch.nn.functional as F
from torch import nn

from strangers.rows import Rows
from strangers.visits import Lifted, normal

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


def labelled(scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


@rows(
    "numerics . softmax fully-masked-softmax",
    {
        "tokens": normal(3, 2, 4),
        "keep": torch.tensor([[1], [0], [1]]),
        "labels": torch.tensor([[1, 2], [-100] * 2, [0, 3]]),
    },
    fix="verified *",
    samples=(1,),
)
class NothingIsLabelled(nn.Module):
    """A sample that is masked throughout has no labels either: alone, its loss is the mean of nothing."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)

    def forward(self, tokens, keep, labels):
        hidden = self.embed(tokens)
        scores = (hidden @ hidden.mT).masked_fill(keep[:, None] == 0, -torch.inf)
        made = scores.softmax(-1) @ hidden
        return {"loss": labelled(made, labels), "made": made}


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


# --- numbers that torch refuses to write into a half-precision tensor: the step ends with an error, not with a NaN


BATCH = {"x": normal(2, 5, 8)}
RAISES = ("raises an error rather than write -inf",)


def attends(hide):
    """Scores of tokens against tokens, hidden by anything, and the mean that they weigh."""

    def attend(query, x):
        scores = query @ x.transpose(-1, -2)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return hide(scores, later).softmax(-1) @ x

    return Lifted(attend)


@rows("precision . masked_fill mask-constant-overflow", BATCH, make=attends, line="scores.masked_fill_(later, -1e9)")
@rows("healthy", BATCH, make=attends, name="in bf16", amp_dtype="bfloat16")
def in_place(scores, later):
    scores = scores.clone()
    scores.masked_fill_(later, -1e9)
    return scores


REFUSED = {
    "masked_fill": lambda scores, later: scores.masked_fill(later, torch.finfo(torch.float32).min),
    "full_like": lambda scores, later: torch.where(later, torch.full_like(scores, -1e20), scores),
    "pad": lambda scores, later: F.pad(scores, (0, 1), value=-1e6)[..., :-1],
}
for op, hide in REFUSED.items():
    rows(f"precision . {op} mask-constant-overflow", BATCH, hide, name=op, says=RAISES)(attends)
for value in (-1e4, -65504.0, float("-inf")):
    rows("healthy", BATCH, lambda scores, later, value=value: scores.masked_fill(later, value), name=f"{value}")(
        attends
    )
