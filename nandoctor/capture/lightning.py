"""The recorder as a callback of Lightning: `Trainer(callbacks=[RecorderCallback()])`."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from nandoctor.capture.recorder import Recorder
from nandoctor.torch_compat import read_loss_scale

# The package that the training uses has the class that its Trainer accepts.
_IS_OLD = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_Callback: Any = importlib.import_module("pytorch_lightning" if _IS_OLD else "lightning.pytorch").Callback


class RecorderCallback(_Callback):  # type: ignore[misc]
    """A callback that records every `training_step`: `Trainer(callbacks=[RecorderCallback(folder="dumps")])`.

    The replay builds the LightningModule with its saved hyperparameters (`self.save_hyperparameters()`) and calls
    `training_step` with the batch. It is compared with the recorded outputs of the module's direct children.

    Args:
        **options: keyword arguments of `nandoctor.Recorder`, except `scaler` and `training_step`, which come from the
            Trainer.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.recorder: Any = None  # a Recorder once the training has begun

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Install the hooks on the module."""
        arguments = {"arguments": dict(pl_module.hparams)} if pl_module.hparams else {}
        self.recorder = Recorder(
            pl_module,
            training_step=True,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **{**arguments, **self.options},
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step and record the state before it."""
        self.recorder.number_next(trainer.global_step, trainer.current_epoch)
        self.recorder.begin(batch)
        num_parameters = len(inspect.signature(pl_module.training_step).parameters)
        with trainer.precision_plugin.forward_context():
            self.recorder.call_training_step(*(batch, batch_idx, 0)[:num_parameters])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Check the loss, which the precision plugin has already scaled."""
        if self.recorder is None:  # an evaluation takes gradients
            return
        scale, _ = read_loss_scale(getattr(trainer.precision_plugin, "scaler", None))
        self.recorder.watch(loss if scale is None else loss.detach() / scale)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """End the step."""
        self.recorder.end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hooks."""
        self.recorder.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save the current step if it is non-finite, and remove the hooks."""
        if self.recorder is not None:
            self.recorder.__exit__(type(exception), exception, None)
