"""Batches near to the one that failed, and a loss where none is known: what a fix has to stand besides the step itself.

In: a batch or an output. Out: a changed batch, or a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nandoctor.tracing.tensor_tree import walk_tensors

Batch = Mapping[str, torch.Tensor]
_NOISE = 1e-3
"""A share of each value: less than the next batch differs by, more than fp16 rounds."""


def surrogate_loss(output: Any, _: Batch) -> torch.Tensor:
    """A scalar through which every floating-point value of the output gets a gradient, none of them the same.

    It stands in where the loss of the training is not known: the mean of each tensor, weighted by a fixed pattern so
    that a softmax or a norm, whose plain mean is constant, has a gradient too.
    """
    total = torch.zeros(())
    for _path, leaf in walk_tensors(output):
        if leaf.is_floating_point() and leaf.numel() and not leaf.is_nested and leaf.layout == torch.strided:
            pattern = torch.linspace(-1, 1, leaf.numel(), device=leaf.device).cos().view(leaf.shape)
            total = total.to(leaf.device) + (leaf.float() * pattern).mean()
    return total


def _rolled(value: torch.Tensor) -> torch.Tensor:
    return value.roll(1, 0) if value.dim() else value


def _noisy(value: torch.Tensor) -> torch.Tensor:
    """Every value changed by a share of itself, so that the zeros of a mask stay zeros."""
    if not value.is_floating_point():
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    return value * (1 + _NOISE * noise)


VARIATIONS: Mapping[str, Callable[[Batch, frozenset[str]], dict[str, torch.Tensor]]] = {
    "samples in another order": lambda batch, used: _each(batch, used, _rolled, whole=True),
    "small noise on the inputs": lambda batch, used: _each(batch, used, _noisy),
}
"""By name, batches that a fix has to hold on as well."""


def _each(
    batch: Batch, used: frozenset[str], change: Callable[[torch.Tensor], torch.Tensor], *, whole: bool = False
) -> dict[str, torch.Tensor]:
    """The batch with its inputs changed, and with `whole` its targets too."""
    return {name: change(value) if whole or name in used else value for name, value in batch.items()}
