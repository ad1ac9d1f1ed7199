"""Steps that have all but one mark of a cause, and are told as something else; and a few that have all of them.

In each the other cause is tried first, so that a mark which is no longer asked for shows as the wrong cause.
"""

import math

import torch

from strangers.rows import Rows
from strangers.visits import mean, normal

rows = Rows()
BATCH = {"x": normal(4, 8)}
DIVISION, OVERFLOW = "precision . div division-by-zero", "precision . {} elementwise-overflow"
NOT_EPS = {
    "an eps above the line": (DIVISION, lambda h, x: (0 * h + 1e-8) / ((0 * h + 1e-3) * 1e-8)),
    "a difference that fp16 holds": (DIVISION, lambda h, x: h / (0 * h - 0.00097657 + 2**-10)),
    "an op that is nowhere singular": (OVERFLOW.format("mul"), lambda h, x: (0 * h + 1e-8 + 6e4) * 2),
}
NOT_A_MASK = {
    "a constant that fits": (
        "numerics . div division-by-zero",
        lambda h, x: h + torch.where(x > 0, 0.0, -6e4).half() / (x > 1).half(),
    ),
    "activations times a constant": (OVERFLOW.format("mul"), lambda h, x: (5 * h.abs() + 3) * -3e4),
}
OF_AN_EXPONENTIAL = {
    "a factor that is the large one": (
        "precision . mul exp-overflow",
        lambda h, x: (h + 20) * torch.exp(0 * h + 10).half(),
    ),
    "another factor that is the large one": (OVERFLOW.format("mul"), lambda h, x: torch.exp(h).half() * (0 * h + 6e4)),
    "an op between": (OVERFLOW.format("mul"), lambda h, x: (torch.exp(0 * h + 10).half() * 2) * (h + 20)),
    "a square": ("numerics . pow elementwise-overflow", lambda h, x: (0 * h.float() + 1e20) ** 2),
    "a product of exponentials": (
        "precision . matmul matmul-overflow",
        lambda h, x: torch.exp(0 * h + 10).half() @ (0 * h.mT + 20),
    ),
}
NOT_TOO_LARGE = {
    "an infinity that is written": (
        "numerics . mul indeterminate-form",
        lambda h, x: h + (x.abs() * math.inf) @ torch.ones(8, 8),
    ),
    "a NaN of large numbers": (
        "numerics . lerp invalid-domain",
        lambda h, x: h + torch.lerp(0 * x.double() - 1.7e308, 0 * x.double() + 1.7e308, 0.0),
    ),
}
for steps in (NOT_EPS, NOT_A_MASK, OF_AN_EXPONENTIAL, NOT_TOO_LARGE):
    for name, (words, step) in steps.items():
        rows.lifted(words, BATCH, name=name)(step)


@rows.lifted("precision . log eps-underflow", BATCH, says=("is absorbed by the larger value",))
def eps_that_one_absorbs_and_that_is_moved(h, x):
    return torch.log((0 * h + 1 + 1e-5).view(-1).half() - 1)


@rows.lifted("numerics . mul elementwise-overflow", BATCH, says=("too large even for float64",))
def product_past_float64(h, x):
    return h + x.double() * 1e200 * 1e200


@rows.lifted("numerics . reciprocal gradient-singularity", BATCH, says=("too large even for fp32",), loss=mean)
def slope_beside_a_pole(h, x):
    return 1 / (1e-30 * h.float() + 1e-25)
