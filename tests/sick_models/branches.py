"""Sums and products of two branches that each fit: residual streams, gates, scales, dropout.

In: nothing. Out: `CASES` of the rows "residual too large" and "gate or scale too large".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sick_models.case import biased, case, rand, randn, scaled, seeded


class VisionBlock(nn.Module):
    """A pre-norm block; one channel of its output bias is a "massive activation"."""

    def __init__(self, width: int, outlier: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-12)
        last = biased(nn.Linear(2 * width, width), outlier, unit=3)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), last)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class VisionTransformer(nn.Module):
    """Patches [batch, 9, 48] -> (logits, features)."""

    def __init__(self, outlier: float) -> None:
        super().__init__()
        self.patch = nn.Linear(48, 32)
        self.blocks = nn.Sequential(*(VisionBlock(32, outlier) for _ in range(4)))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(self.blocks(self.patch(patches)))
        return self.head(features[:, 0]), features


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


class GatedUnit(nn.Module):
    """gelu(a) * b: both halves fit, their product does not."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.wide = scaled(nn.Linear(width, 4 * width), gain)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.wide(x).chunk(2, dim=-1)
        return self.narrow(F.gelu(gate) * value)


class Reader(nn.Module):
    """Tokens [batch, length] through gated units; one unit serves twice."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.norms = nn.ModuleList([nn.LayerNorm(24) for _ in range(3)])
        self.early = GatedUnit(24, 1.0)
        self.late = GatedUnit(24, gain)
        self.head = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 30))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, unit in zip(self.norms, (self.early, self.early, self.late), strict=True):
            x = x + unit(norm(x))
        return self.head(x)


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
        "residual/vision-transformer",
        seeded(VisionTransformer, outlier=3e4),
        lambda: {"patches": randn(2, 9, 48)},
        "precision blocks.2 add elementwise-overflow",
        line="x + self.mlp(self.norm(x))",
        repair={"build": seeded(VisionTransformer, outlier=300.0)},
    ),
    case(
        "residual/upscaler-in-place",
        seeded(Upscaler, loud=3.5e4),
        lambda: {"image": rand(2, 3, 8, 8)},
        "precision trunk.0 add elementwise-overflow",
        line="out += x",
        repair={"build": seeded(Upscaler, loud=0.5)},
    ),
    case(
        "gate/geglu",
        seeded(Reader, gain=500.0),
        lambda: {"tokens": torch.arange(20).view(2, 10)},
        "precision late mul elementwise-overflow",
        line="F.gelu(gate) * value",
        repair={"build": seeded(Reader, gain=1.0)},
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
