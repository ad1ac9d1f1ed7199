"""Gradients that only fp16 cannot hold, a custom Function with a careless backward, and loss scales that are too high.

In: nothing. Out: `CASES` of the rows "fp16 gradient", "custom Function" and "loss scale".
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from sick_models.case import Batch, case, randn, scaled, seeded


def classes(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch["label"])


class NormalisedMix(nn.Module):
    """Weights over their sum: where the sum is small, d/dx of 1/x is its square."""

    def __init__(self, width: int, small: float) -> None:
        super().__init__()
        self.weigh = nn.Linear(width, width)
        self.small = small

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.weigh(x)) * self.small
        return weights / weights.mean(dim=-1, keepdim=True)


class PatchMixer(nn.Module):
    """Images [batch, 3, 8, 8] -> logits, with a mixing whose weights are tiny before they are normalised."""

    def __init__(self, small: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.mix = NormalisedMix(12, small)
        self.head = nn.Linear(12, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        return self.head((x * self.mix(x)).sum(dim=1))


class CarefulSwish(Function):
    """x * sigmoid(x), saving memory: the backward is written with exp(x) on both sides of the fraction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grown_x = torch.exp(x.float())
        return gradient * (grown_x * (grown_x + x + 1) / (grown_x + 1) ** 2).to(gradient.dtype)


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return CarefulSwish.apply(x)


class Depthwise(nn.Module):
    """Images [batch, 3, 8, 8] through an inverted bottleneck -> logits."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 12, 1)
        self.filter = scaled(nn.Conv2d(12, 12, 3, groups=12), gain)
        self.activate = Swish()
        self.head = nn.Sequential(nn.Flatten(), nn.LayerNorm(12 * 36), nn.Linear(12 * 36, 4))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.activate(self.filter(self.expand(image))))


class TwoTowers(nn.Module):
    """Songs [batch, 20] and covers [batch, 9] -> similarities over a fixed temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.song = nn.Linear(20, 8)
        self.cover = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, song: Tensor, cover: Tensor) -> Tensor:
        left, right = F.normalize(self.song(song), dim=-1), F.normalize(self.cover(cover), dim=-1)
        return torch.einsum("sd,cd->sc", left, right) / 0.05


def matched(output: Tensor, _batch: Batch) -> Tensor:
    return F.cross_entropy(output, torch.arange(len(output), device=output.device))


CASES = (
    case(
        "gradient/small-denominator",
        seeded(PatchMixer, small=2e-6),
        lambda: {"image": 3.0 * randn(2, 3, 8, 8), "label": torch.tensor([0, 2])},
        "precision mix div gradient-overflow",
        loss=classes,
        line="weights / weights.mean(dim=-1, keepdim=True)",
        repair={"build": seeded(PatchMixer, small=1.0)},
    ),
    case(
        "function/swish",
        seeded(Depthwise, gain=400.0),
        lambda: {"image": randn(2, 3, 8, 8), "label": torch.tensor([1, 3])},
        "numerics activate exp exp-overflow",
        loss=classes,
        line="grown_x = torch.exp(x.float())",
        repair={"build": seeded(Depthwise, gain=1.0)},
    ),
    case(
        "scale/two-towers",
        seeded(TwoTowers),
        lambda: {"song": randn(4, 20), "cover": randn(4, 9, seed=1)},
        "loss-scale . div loss-scale-overflow",
        loss=matched,
        loss_scale=65536.0,
        line='torch.einsum("sd,cd->sc", left, right) / 0.05',
        repair={"loss_scale": 1024.0},
    ),
)
