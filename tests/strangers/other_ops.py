"""Causes at the ops that few models use for it: other sums, exponentials and spreads."""

import torch
import torch.nn.functional as F

from strangers.rows import Rows
from strangers.visits import normal

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
