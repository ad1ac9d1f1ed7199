"""Gradients where no loss is known: those of a stand-in, asked for before a step is called healthy."""

from __future__ import annotations

from dataclasses import replace

from nandoctor.diagnosis.conclusion import Gap
from nandoctor.diagnosis.verdict import doubt_gradients
from nandoctor.errors import LossError, ModelError
from nandoctor.fixes.variations import surrogate_loss
from nandoctor.replaying.module_state import is_large
from nandoctor.replaying.runner import FailingStep, Watch

_SCALE = 2.0**-10
"""So small that a gradient which is non-finite for its size alone is finite."""


def find_doubts(step: FailingStep) -> tuple[Gap, ...]:
    """Tell of a finite forward in training whose gradients are non-finite; nothing of a large model, for the memory."""
    is_trained = step.training and any(parameter.requires_grad for parameter in step.model.parameters())
    if not is_trained or is_large(step.model):
        return ()
    stand_in = replace(step, loss=surrogate_loss, loss_scale=_SCALE)
    watch = Watch(stage="backward", statistics="none", backward=True)
    try:
        if not stand_in.run(watch=watch).trace.bad_gradients:
            return ()
        return (doubt_gradients(stand_in.run(watch=replace(watch, ops=True)).trace),)
    except (LossError, ModelError):  # the output depends on no weight, or this device has no backward for it
        return ()
