"""What steps of several packages have in common."""

from __future__ import annotations

import torch
from sick_models.case import Batch
from torch import Tensor, nn


class Gain(nn.Module):
    """What comes in, times a learned number: something for the gradient to reach."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x * self.gain


def mean(output: Tensor, _batch: Batch) -> Tensor:
    """The mean of the output."""
    return output.float().mean()
