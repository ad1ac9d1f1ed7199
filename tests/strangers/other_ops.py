"""Causes at the ops that few models use for it: other sums, exponentials and spreads."""

import torch
import torch.nn.functional as F

from strangers.rows import Rows
from strangers.visits import mean, normal

rows = Rows()
BATCH = {"x": normal(4, 8)}
PRECISION = {
    "avg_pool2d": ("reduction-overflow", lambda h, x: F.avg_pool2d((h + 30_000)[None], (1, 8), divisor_override=1)),
    "sum": ("reduction-overflow", lambda h, x: (h + 30_000).sum(-1, dtype=h.dtype)),
    "var": ("reduction-overflow", lambda h, x: (1000 * h).var(-1)),
    "exp2": ("exp-overflow", lambda h, x: torch.exp2(h.clamp(-1, 1) + 16)),
}
for op, (cause, function) in PRECISION.items():
    rows.lifted(f"precision . {op} {cause}", BATCH, name=op, fix="verified keep-op")(function)


@rows.between("numerics middle std empty-reduction", BATCH, fix="verified clamp")
def spread_of_one_row(x):
    return x - x[:1].std(0)


FIRST = torch.arange(4)[:, None] == 0
"""A row of scores that is hidden as a whole."""


def hidden_by_a_product(h, x):
    scores = h @ h.mT
    return (scores + FIRST.to(scores.dtype) * -1e9).softmax(-1)


def hidden_by_the_lowest_number(h, x):
    lowest = torch.finfo(h.dtype).min * FIRST.to(h.dtype)
    return (lowest + (h - 100)).softmax(-1)


def hidden_by_a_choice(h, x):
    scores = torch.where(FIRST, -1e9, h @ h.mT)
    return scores.softmax(-1)


for mask, op in ((hidden_by_a_product, "mul"), (hidden_by_the_lowest_number, "add"), (hidden_by_a_choice, "where")):
    rows.lifted(f"precision . {op} mask-constant-overflow", BATCH, fix="verified *")(mask)


@rows.lifted("precision . sqrt eps-underflow", BATCH, phase="backward", loss=mean)
def root_whose_eps_is_lost(h, x):
    edges = h - h[:1]
    return torch.sqrt(edges * edges + 1e-8)
