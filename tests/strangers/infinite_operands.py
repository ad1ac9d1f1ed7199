"""Ops with a value for infinities and without a derivative: the gradient is an indeterminate form, not infinite."""

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
X = normal(3, 2).abs() + 0.5
CLOSED = {"x": X, "closed": torch.tensor([[False, False], [True, True], [False, True]])}
BACKWARD = {"phase": "backward", "inputs": "x,closed", "loss": lambda output, _: output.sum()}


@rows("numerics . logaddexp indeterminate-form", CLOSED, 2, 2, **BACKWARD)
@rows("healthy", {"x": X, "closed": torch.tensor([[False, True]] * 3)}, 2, 2, name="harmless", loss=BACKWARD["loss"])
class Merge(nn.Linear):
    """Log probabilities of two ways, either of which may be closed."""

    def forward(self, x, closed):
        scores = super().forward(x).float() + torch.where(closed, -torch.inf, 0.0)
        return torch.logaddexp(scores[:, 0], scores[:, 1]).exp()


@rows("numerics . mul indeterminate-form", CLOSED, **BACKWARD)
class Reach(nn.Module):
    """How much of what is so far away arrives; nothing from infinitely far."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.ones(2))

    def forward(self, x, closed):
        far = x.masked_fill(closed, torch.inf)
        return torch.exp(-(far * self.rate).float())


@rows("numerics . sqrt gradient-singularity", CLOSED, **BACKWARD)
class Length(nn.Module):
    """The root of what may be 0, beside an infinity that is no trouble: here the slope is infinite."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.ones(2))

    def forward(self, x, closed):
        squared = ((x * self.rate).float() ** 2).sum(1) * closed.any(1)
        roots = torch.cat([squared, squared.new_full((1,), torch.inf)]).sqrt()
        return roots[:-1]
