"""Whole numbers: counts below the line, positions and times that are too large, results that an op writes to."""

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
BATCH = {"x": normal(4, 8)}
DIVISION = "numerics . div division-by-zero"

rows.lifted(DIVISION, BATCH, name="sum over no element")(lambda h, x: h.sum() / (x > 100).sum())
rows.lifted(DIVISION, BATCH, name="count from Python")(lambda h, x: h.sum(0) / (len(x) - 4))
rows.lifted(DIVISION, BATCH, name="count as a tensor")(lambda h, x: h.sum(0) / torch.tensor([len(x) - 4]))
rows.lifted("healthy", BATCH, name="count of at least one")(lambda h, x: h.sum() / (x > 100).sum().clamp(min=1))


@rows.lifted("numerics . rsqrt division-by-zero", BATCH)
def root_of_no_element(h, x):
    return h * torch.rsqrt((x > 100).sum(0))


@rows.lifted("numerics . log log-of-zero", BATCH)
def log_of_no_element(h, x):
    return h + torch.log((x > 100).sum(0))


@rows("precision . to input-cast-overflow", {"ids": torch.tensor([[70000, 2], [3, 4]])}, samples=(0,))
class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, ids):
        return ids.half() * self.gain


@rows.lifted("precision . mul elementwise-overflow", BATCH, line="torch.mul(h, 3e6, out=scratch)")
def memory_that_an_op_is_told_to_write_to(h, x):
    scratch = torch.full_like(h, float("nan"))
    torch.mul(h, 3e6, out=scratch)
    return scratch
