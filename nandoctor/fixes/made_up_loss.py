"""The loss that stands in for one that is not known, and what its gradients say of any loss."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nandoctor.engine.call import Batch
from nandoctor.engine.module_state import is_large
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.errors import LossError, ModelError
from nandoctor.tracing.tensor_stats import walk_tensors

_MOST_OUTPUTS = 4
_SCALE = 2.0**-10
"""So small that a gradient is finite if only its size made it non-finite."""


def surrogate_loss(output: Any, _: Batch) -> torch.Tensor:
    """Return a scalar through which every floating-point value of the output gets a gradient of its own.

    It stands in for a training loss that is not known: the mean of each tensor, weighted by a fixed pattern so that a
    softmax or a norm, whose plain mean is constant, has a gradient too.
    """
    total = torch.zeros(())
    for _path, leaf in walk_tensors(output):
        if leaf.is_floating_point() and leaf.numel() and not leaf.is_nested and leaf.layout == torch.strided:
            pattern = torch.linspace(-1, 1, leaf.numel(), device=leaf.device).cos().view(leaf.shape)
            total = total.to(leaf.device) + (leaf.float() * pattern).mean()
    return total


def with_doubtful_loss(step: FailingStep) -> FailingStep | None:
    """Return the step with a made-up loss if its gradients are non-finite; None too for a large model, to save memory.

    The step is one in training whose forward is finite, and whose loss is not known.
    """
    is_trained = step.mode.training and any(parameter.requires_grad for parameter in step.model.parameters())
    if not is_trained or is_large(step.model):
        return None
    stand_in = replace(step, loss=surrogate_loss, mode=replace(step.mode, loss_scale=_SCALE))
    return stand_in if _fails(stand_in) else None


def fails_with_any_loss(step: FailingStep) -> bool:
    """Return True if a gradient of 0 for any one tensor of the output makes others NaN: then that of any loss does.

    Torch multiplies a gradient by derivatives alone, and 0 times a number is 0: one of them is infinite.
    """
    made = step.run(watch=Watch(stage="backward", statistics="none", backward=True)).output
    places = [place for place, (_, leaf) in enumerate(walk_tensors(made)) if leaf.requires_grad]
    return 0 < len(places) <= _MOST_OUTPUTS and all(
        _fails(replace(step, loss=partial(_zero_loss, place=place))) for place in places
    )


def _zero_loss(output: Any, _: Batch, *, place: int) -> torch.Tensor:
    """Return 0, with a gradient of 0 for one tensor of the output."""
    return ([*walk_tensors(output)][place][1].float() * 0).sum()


def _fails(step: FailingStep) -> bool:
    with suppress(LossError, ModelError):  # the output depends on no weight, or this device has no backward for it
        return bool(step.run(watch=Watch(stage="backward", statistics="none", backward=True)).trace.bad_gradients)
    return False
