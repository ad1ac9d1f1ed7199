"""A module that computes in fp8 by itself is run as it is, and the report says what that means."""

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
BATCH = {"x": normal(4, 8)}


@rows("*", BATCH, 1.0, never=("in fp8-e5m2 (first: ",))
@rows("*", BATCH, 1e6, says=("in fp8-e5m2 (first: ",))
class Quantized(nn.Module):
    """Casts to fp8 in its own forward, without a module or a class that says so: a matter of bits, and told as that."""

    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x):
        return (self.linear(x).float() * self.scale).to(torch.float8_e5m2).float()
