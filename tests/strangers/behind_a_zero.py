"""An exact 0 that was made of an infinity: what made the infinity comes first, if the code did not write it itself."""

import math

import torch

from strangers.rows import Rows
from strangers.visits import mean, normal

rows = Rows()
STILL = {"x": normal(4, 8).index_fill(0, torch.tensor(1), 0.0)}
LOGARITHM = "numerics . log log-of-zero"


@rows.lifted(LOGARITHM, STILL, line="noise = torch.log(x.abs())", samples=(1,), also=("division-by-zero",))
def last_step_of_a_scheduler(h, x):
    noise = torch.log(x.abs())
    ratio = 1.0 / (2.0 - noise)
    return h * (1.0 / ratio)


@rows.lifted("precision . mul elementwise-overflow", {"x": 400 * normal(4, 8)}, line="energy = h * h")
def inverse_energy(h, x):
    energy = h * h
    return torch.log(energy.reciprocal())


@rows.lifted(LOGARITHM, STILL, line="torch.log(h.float()", loss=mean)
def class_that_the_code_bans(h, x):
    return torch.log(h.float().masked_fill(x > 1, -math.inf).softmax(-1))
