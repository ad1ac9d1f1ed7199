"""Gradients through what the forward hides: selections after the fact, infinities that a division swallows."""

import math

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import Lifted, mean, normal

rows = Rows()
BATCH = {"x": normal(4, 8)}
SELECTIONS = {
    "log": lambda h: torch.log(h).nan_to_num(neginf=0.0),
    "sqrt": lambda h: torch.sqrt(h)[h > 0],
    "pow": lambda h: (h**0.5).clamp(min=0.05),
    "div": lambda h: (h / (h * h)).nan_to_num(0.0),
    "rsqrt": lambda h: torch.rsqrt(h).masked_fill(h == 0, 0.0),
}
HIDE_NOTHING = {"plain": torch.sqrt, "limited": lambda h: torch.relu(1 - torch.sqrt(h)).square()}


def head(then, keep):
    """A layer, and anything after it; `keep` makes exact zeros of its negative outputs."""
    return Lifted(lambda h, x: then(h * (h > 0) if keep else h.abs() + 0.1))


for op, then in SELECTIONS.items():
    rows(f"numerics . {op} where-gradient-trap", BATCH, then, True, name=op, phase="backward", loss=mean)(head)
    rows("healthy", BATCH, then, False, name=f"{op} with nothing to hide", loss=mean)(head)
rows(
    "numerics . sqrt where-gradient-trap",
    BATCH,
    lambda h: torch.where(h > 0.2, h * torch.sqrt(h - 0.2), h),
    True,
    name="NaN times a number that is learned",
    also=(),
    loss=mean,
)(head)
for name, then in HIDE_NOTHING.items():
    of_zero = {"says": ("is infinite at 0",), "loss": mean}
    rows("numerics . sqrt gradient-singularity", BATCH, then, True, name=name, **of_zero)(head)


PADDED = torch.rand(4, 8).index_put((torch.tensor([1, 3]), torch.tensor([5, 7])), torch.tensor(float("inf")))


@rows(
    "numerics . mul where-gradient-trap",
    {**BATCH, "target": -PADDED},
    *(8, 8),
    samples=(1, 3),
    loss=mean,
    fix="verified mask-first",
)
class Padded(nn.Linear):
    """A divergence from a target with -Inf where there is none."""

    def forward(self, x, target):
        h = super().forward(x).log_softmax(1)
        return (h.exp() * (h - target)).where(torch.isfinite(target), 0.0)


OUTSIDE = {
    "log": lambda h, x: torch.where(x > 0, h * x.log(), -math.inf),
    "sqrt": lambda h, x: (h * torch.sqrt(x) + h).masked_fill(x < 0, -math.inf),
    "acos": lambda h, x: torch.where(x.abs() < 1, h * torch.acos(x), -math.inf),
}


def mixed(then):
    """A part of a mixture has no density where its function is not defined: the code says so itself."""
    return Lifted(lambda h, x: torch.logsumexp(torch.stack([h, then(h, x)]), 0))


for op, then in OUTSIDE.items():
    rows(f"numerics . {op} *", BATCH, then, name=f"{op} outside", loss=mean, fix="verified mask-first")(mixed)


@rows("numerics . exp exp-overflow", BATCH, 2000.0, phase="forward", says=("hides that Inf",), loss=mean)
@rows("healthy", BATCH, 20.0, loss=mean)
def damped(gain):
    """h / (1 + exp(h * gain)): the quotient is 0 where the exponential is infinite."""
    return Lifted(lambda h, x: h.float() / (1 + torch.exp(h.float() * gain)))
