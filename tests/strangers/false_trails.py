"""Right places with a wrong cause in plain sight, and healthy steps that look ill."""

import math

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import louder, normal

rows = Rows()
MANY = {"x": normal(30, 8)}


@rows.between("precision middle log log-of-zero", MANY)
def saturated_sigmoid_behind_a_norm_with_its_eps(x):
    centred = x - x.mean(-1, keepdim=True)
    unit = centred / ((centred * centred).mean(-1, keepdim=True) + 1e-8).sqrt()
    return torch.log(1 - torch.sigmoid(6 * unit))


@rows("precision 0 conv2d matmul-overflow", {"image": torch.full((2, 3, 8, 8), 100.0)})
def convolution_over_a_blank_image():
    model = nn.Sequential(louder(nn.Conv2d(3, 4, 5), 3e3), nn.BatchNorm2d(4))
    with torch.no_grad():
        model[0].weight.abs_()
    return model


@rows.between("precision middle matmul matmul-overflow", {"x": 30 * normal(2, 6, 8)})
class MaskThatFitsBesideScoresThatDoNot(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = louder(nn.Linear(8, 8), 300.0)

    def forward(self, x):
        scores = self.query(x) @ x.transpose(-1, -2)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x


UNIFORM = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
UNIFORM[1, 2], UNIFORM[3, 3] = 0.0, 1.0


@rows.lifted("numerics . log log-of-zero", {"x": UNIFORM}, samples=(3,))
def infinity_that_a_softmax_makes_zero_of(h, x):
    return torch.softmax(h - torch.log(-torch.log(x)), -1)


# --- healthy steps that look ill: infinities to begin with, NaN that is replaced before anything reads it


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
