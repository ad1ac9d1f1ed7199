"""The recorder as a callback of the Trainer of transformers: `Trainer(..., callbacks=[RecorderCallback()])`.

In: what the Trainer tells its callbacks, and the model's forward. Out: dumps whose replay calls the model.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from nandoctor.capture.recorder import Recorder
from nandoctor.replaying.script_import import stop_import


class RecorderCallback(TrainerCallback):
    """Records every forward in training; `options` are those of `Recorder`.

    The loss is the one in the model's own output. The replay builds the model from its configuration, which the dump
    holds. Where another loss is computed outside of the model, the output alone is looked at.
    """

    def __init__(self, **options: Any) -> None:
        stop_import()
        self.options = options
        self.recorder: Recorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the hooks on the model."""
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)
        self.recorder = Recorder(kwargs["model"], scaler=scaler, from_output=True, **self.options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Number the step as the Trainer does."""
        if self.recorder is not None:
            self.recorder.next_step = state.global_step
            self.recorder.epoch = None if state.epoch is None else int(state.epoch)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the hooks off."""
        if self.recorder is not None:
            self.recorder.close()
