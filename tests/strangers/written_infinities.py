"""Infinities that the code writes down: in a dozen ways as masks, which are innocent, and in a few that are not."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from strangers.rows import Rows
from strangers.visits import mean_square, normal

rows = Rows()
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
BATCH = {"x": normal(2, 5, 8)}


def by_assignment(scores):
    scores = scores.clone()
    scores[:, CAUSAL] = -math.inf
    return scores


def by_where_with_a_tensor(scores):
    return torch.where(CAUSAL, torch.tensor(-math.inf, dtype=scores.dtype), scores)


def by_adding_an_array(scores):
    return scores + torch.from_numpy(np.triu(np.full((5, 5), -np.inf, np.float32), 1)).to(scores.dtype)


def by_the_logarithm_of_a_mask(scores):
    return scores + torch.log((~CAUSAL).to(scores.dtype))


def by_padding(scores):
    return pad(scores[..., :4], (0, 1), value=-math.inf)


WAYS = (by_assignment, by_where_with_a_tensor, by_adding_an_array, by_the_logarithm_of_a_mask, by_padding)


class Attention(nn.Module):
    def __init__(self, hide, gain=1.0):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.hide = hide
        with torch.no_grad():
            self.head.weight.mul_(gain)

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.hide(x @ x.mT).softmax(-1) @ x)


class Choice(nn.Module):
    def __init__(self, hide):
        super().__init__()
        self.score = nn.Linear(8, 5)
        self.hide = hide

    def forward(self, x):
        return self.hide(self.score(x))


def sound_gradients(report):
    return not report.bad_gradients


LOUD, OVERFLOW = {"x": 10 * normal(2, 5, 8)}, "precision head linear matmul-overflow"
for hide in WAYS:
    rows("healthy", BATCH, hide, holds=sound_gradients, loss=mean_square)(Attention)
    rows("healthy", BATCH, hide)(Choice)
    rows(OVERFLOW, LOUD, hide, 2e4)(Attention)


def of_label(output, batch):
    return cross_entropy(output[:, 0].float(), batch["label"])


def labeled(last):
    return {**BATCH, "label": torch.tensor([0, last])}


LINES = {
    by_where_with_a_tensor: "return torch.where(CAUSAL, torch.tensor(-math.inf, dtype=scores.dtype), scores)",
    by_the_logarithm_of_a_mask: "return scores + torch.log((~CAUSAL).to(scores.dtype))",
    by_padding: "return pad(scores[..., :4], (0, 1), value=-math.inf)",
}
for hide, line in LINES.items():
    label = {"loss": of_label, "inputs": "x"}
    rows("healthy", labeled(0), hide, name=f"label beside {hide.__name__}", **label)(Choice)
    rows("numerics . * log-of-zero", labeled(4), hide, name=f"label {hide.__name__}", line=line, **label)(Choice)


SHARP = "return (scores * 40.0).softmax(-1) @ x"


@rows.applied("precision . mul elementwise-overflow", {"x": 30 * normal(2, 5, 8)}, line=SHARP)
def scores_that_overflow_after_they_were_masked(x):
    scores = (x @ x.mT).masked_fill(CAUSAL, -math.inf)
    return (scores * 40.0).softmax(-1) @ x


@rows("numerics . masked_fill indeterminate-form", BATCH, 5, 2)
class Distances(nn.Linear):
    """An infinite distance that goes into the next layer."""

    def forward(self, x):
        return super().forward(torch.cdist(x, x).masked_fill(torch.eye(5, dtype=torch.bool), math.inf))


@rows.applied("numerics . sub indeterminate-form", {"x": normal(4, 8)})
def two_infinities_that_meet(x):
    return x.masked_fill(x < 0, math.inf) - x.masked_fill(x < 1, math.inf)


SILENT = normal(3, 5).abs()
SILENT[1, 2] = 0


@rows("numerics", {"x": SILENT}, 5, 2, line="return super().forward(torch.from_numpy(levels))")
@rows("healthy", {"x": SILENT + 1}, 5, 2, name="logarithm of numbers that numpy has")
class LogarithmThatNumpyTookOfZero(nn.Linear):
    def forward(self, x):
        with np.errstate(divide="ignore"):
            levels = np.log(x.numpy())
        return super().forward(torch.from_numpy(levels))


def of_places(hidden):
    place = torch.tensor([1.0, 256, 257, 300, 400]).to(hidden.dtype)
    return 1 / (place[:, None] - place).abs()


def of_shares(function):
    return lambda hidden: function((torch.eye(5) + torch.eye(5).roll(1, 0) * 1e-9).to(hidden.dtype))


def beside_an_eps(share):
    """The eps is lost, and would have made no difference."""
    return 1 / (share + 0 * (0 * share + 1e-8))


FIVE = {"x": normal(5, 4)}
OPS = {"holds": lambda report: report.origin.op in ("reciprocal", "div", "log", "pow")}


@rows("precision * * division-by-zero", FIVE, of_places, amp_dtype="bfloat16", **OPS)
@rows("precision * * division-by-zero", FIVE, of_shares(beside_an_eps), name="eps", amp_dtype="float16", **OPS)
@rows("precision * * log-of-zero", FIVE, of_shares(torch.log), name="log", amp_dtype="float16", **OPS)
@rows(
    "precision * * division-by-zero",
    FIVE,
    of_shares(lambda share: share.pow(-0.5)),
    name="root",
    amp_dtype="float16",
    **OPS,
)
class MoreInfinitiesThanAreMeant(nn.Linear):
    """A mask removes those that fp32 has too; what rounding adds to them is left, and the op is to blame for it."""

    def __init__(self, make):
        super().__init__(4, 4)
        self.make = make

    def forward(self, x):
        hidden = super().forward(x)
        made = self.make(hidden)
        meant = self.make(hidden.float()).isinf()
        return made.to(hidden.dtype).masked_fill(meant, 0) @ hidden
