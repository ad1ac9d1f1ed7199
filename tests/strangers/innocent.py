"""Healthy steps that look ill: infinities to begin with, NaN that is replaced before anything reads it."""

import math

import torch

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
ZEROS = {"x": normal(4, 8).relu()}
HOLES = {"x": normal(4, 8).masked_fill(torch.eye(4, 8).bool(), math.nan)}
STEPS = {
    "logarithm that where selects": (lambda h, x: h + torch.where(x > 0, torch.log(x), 0.0), ZEROS),
    "holes that are filled first": (lambda h, x: torch.where(x.isnan(), 0.0, x) + x.isnan(), HOLES),
    "running maximum and minimum": (
        lambda h, x: torch.full_like(h, -math.inf).maximum(h) + torch.full_like(h, math.inf).minimum(h.abs()),
        ZEROS,
    ),
}
for name, (step, batch) in STEPS.items():
    rows.lifted("healthy", batch, name=name)(step)
