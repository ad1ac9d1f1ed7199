"""Divisions by zero and reductions of nothing: empty organs, nothing measured.

In: nothing. Out: `CASES` of the row "0/0, empty mean".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, case, rand, randn, seeded


class DepthNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        return F.softplus(self.body(image)).squeeze(1)


def error_where_measured(output: Tensor, batch: Batch) -> Tensor:
    """No pixel of the lidar was valid: the gradients are zeros, only the loss says NaN."""
    return (output - batch["depth"])[batch["valid"]].abs().mean()


class Segmenter(nn.Module):
    """Volumes [batch, 1, 6, 6, 6] -> {"probability"}: exact zeros outside, by a hard gate."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 1))

    def forward(self, volume: Tensor) -> Batch:
        return {"probability": F.hardsigmoid(self.body(volume) - 9.0)}


class SoftSegmenter(Segmenter):
    """The same with a gate that opens."""

    def forward(self, volume: Tensor) -> Batch:
        return {"probability": F.hardsigmoid(self.body(volume))}


def dice_without_eps(output: Batch, batch: Batch) -> Tensor:
    probability, organ = output["probability"].float(), batch["organ"]
    overlap = (probability * organ).sum(dim=(1, 2, 3, 4))
    return (1 - 2 * overlap / (probability + organ).sum(dim=(1, 2, 3, 4))).mean()


def measured(*, any_valid: bool) -> Batch:
    valid = torch.full((2, 8, 8), any_valid)
    return {"image": rand(2, 3, 8, 8), "depth": rand(2, 8, 8, seed=1), "valid": valid}


CASES = (
    case(
        "ratio/no-organ",
        seeded(Segmenter),
        lambda: {"volume": randn(2, 1, 6, 6, 6), "organ": torch.zeros(2, 1, 6, 6, 6)},
        "numerics <loss> div division-by-zero",
        loss=dice_without_eps,
        phase="loss",
        line="2 * overlap / (probability + organ)",
        repair={"build": seeded(SoftSegmenter)},
    ),
    case(
        "ratio/nothing-measured",
        seeded(DepthNetwork),
        lambda: measured(any_valid=False),
        "numerics <loss> mean empty-reduction",
        loss=error_where_measured,
        phase="loss",
        line='[batch["valid"]].abs().mean()',
        repair={"batch": lambda: measured(any_valid=True)},
    ),
)
