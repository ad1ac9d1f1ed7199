"""Sums of two branches that each fit, and the scale of dropout.

In: nothing. Out: `CASES` of the rows "residual too large" and "gate or scale too large".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sick_models.case import biased, case, rand, randn, seeded


class PlainResidual(nn.Module):
    """A residual block without normalisation, as in super-resolution networks; adds in place."""

    def __init__(self, channels: int, loud: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="replicate")
        self.second = biased(nn.Conv2d(channels, channels, 3, padding=1, padding_mode="replicate"), loud)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(F.relu(self.first(x)))
        out += x
        return out


class Upscaler(nn.Module):
    """Small images [batch, 3, 8, 8] -> [batch, 3, 16, 16]; its blocks are checkpointed."""

    def __init__(self, loud: float) -> None:
        super().__init__()
        self.entry = biased(nn.Conv2d(3, 12, 1), loud)
        self.trunk = nn.ModuleList([PlainResidual(12, loud), PlainResidual(12, loud)])
        self.norm = nn.GroupNorm(3, 12)
        self.exit = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, image: Tensor) -> Tensor:
        x = self.entry(image)
        for block in self.trunk:
            x = checkpoint(block, x, use_reentrant=False)
        return self.exit(self.norm(x))


class Churn(nn.Module):
    """A table [batch, 10]; the survivors of the dropout are multiplied by 1 / (1 - p)."""

    def __init__(self, loud: float) -> None:
        super().__init__()
        self.hidden = biased(nn.Linear(10, 64), loud * torch.linspace(0.7, 1.0, 64))
        self.drop = nn.Dropout(0.5)
        self.scale = nn.LayerNorm(64, eps=1e-12)
        self.head = nn.Linear(64, 1)

    def forward(self, table: Tensor) -> Tensor:
        return self.head(self.scale(self.drop(F.relu(self.hidden(table)))))


CASES = (
    case(
        "residual/upscaler-in-place",
        seeded(Upscaler, loud=3.5e4),
        lambda: {"image": rand(2, 3, 8, 8)},
        "precision trunk.0 add elementwise-overflow",
        line="out += x",
        repair={"build": seeded(Upscaler, loud=0.5)},
    ),
    case(
        "gate/dropout-scale",
        seeded(Churn, loud=5e4),
        lambda: {"table": randn(3, 10)},
        "precision drop dropout elementwise-overflow",
        line="self.scale(self.drop(F.relu(self.hidden(table))))",
        repair={"build": seeded(Churn, loud=50.0)},
    ),
)
