"""The recorder as a callback of transformers' Trainer: `Trainer(..., callbacks=[RecorderCallback()])`."""

from __future__ import annotations

import functools
from copy import copy
from typing import Any

from transformers import TrainerCallback

from nandoctor.capture.recorder import Recorder


class RecorderCallback(TrainerCallback):
    """A callback that records every training forward: `Trainer(..., callbacks=[RecorderCallback(folder="dumps")])`.

    The loss is taken from the model's output. If the Trainer computes the loss outside of the model (an overridden
    `compute_loss`, a `compute_loss_func`), call `watch` with the Trainer, and pass `loss`, so that the replay can
    compute it. The replay builds the model from its configuration, which is in the dump.

    Args:
        **options: keyword arguments of `nandoctor.Recorder`, except `scaler` and `from_output`, which come from the
            Trainer.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.recorder: Any = None  # a Recorder once the training has begun
        self._watches_trainer = False

    def watch(self, trainer: Any) -> None:
        """Check the losses that the Trainer's `compute_loss` returns in training, instead of those of the model.

        Args:
            trainer: the Trainer that has this callback; call this before it trains.
        """
        compute_loss = trainer.compute_loss
        self._watches_trainer = True

        @functools.wraps(compute_loss)
        def compute_and_watch(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            is_step = trainer.is_in_train and model.training
            if is_step:
                self.recorder.begin(copy(inputs))  # an overridden compute_loss may pop the labels
            computed = compute_loss(model, inputs, *args, **kwargs)
            if is_step:
                self.recorder.watch(computed[0] if isinstance(computed, tuple) else computed)
            return computed

        trainer.compute_loss = compute_and_watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the hooks on the model."""
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)
        self.recorder = Recorder(kwargs["model"], scaler=scaler, from_output=not self._watches_trainer, **self.options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the numbers of the step and the epoch from the Trainer."""
        self.recorder.number_next(state.global_step, None if state.epoch is None else int(state.epoch))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks."""
        self.recorder.close()
