"""Products with beta=0 do not read what they are added to: memory as it lies there is no evidence."""

import math

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
BATCH = {"x": normal(2, 5, 16)}


def names_its_operand(report):
    return "absmax_batch1" in {item.name for item in report.cause.evidence}


@rows("healthy", BATCH, 1.0, 0)
@rows("precision . baddbmm matmul-overflow", BATCH, 1e3, 0, also=(), holds=names_its_operand)
@rows("numerics", BATCH, 1.0, 1, holds=lambda report: report.origin.elements.kinds == ("nan",))
class Scores(nn.Module):
    """Attention scores as older code writes them: baddbmm into memory that holds anything."""

    def __init__(self, gain, beta):
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.register_buffer("gain", torch.tensor(gain), persistent=False)
        self.beta = beta

    def forward(self, x):
        query = self.query(x) * self.gain
        memory = torch.full((len(x), x.shape[1], x.shape[1]), math.nan, dtype=query.dtype)
        scores = torch.baddbmm(memory, query, query.mT, beta=self.beta)
        return scores.softmax(-1) @ x


SHAPES = {"addmm": [(3, 4), (4, 3)], "addmv": [(3, 4), (4,)], "addr": [(3,), (3,)], "addbmm": [(2, 3, 4), (2, 4, 3)]}


class Product(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        factors = [x.mean() * torch.ones(shape) for shape in SHAPES[self.name]]
        memory = torch.full((3,) if self.name == "addmv" else (3, 3), math.nan)
        return getattr(torch, self.name)(memory.to(torch.float16), *factors, beta=0)


for name in SHAPES:
    rows("healthy", {"x": normal(2, 5)}, name)(Product)
