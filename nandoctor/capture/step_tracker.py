"""Follows a training step from its first forward to the optimizer's update, and has it decided once its flags are here.

In: forwards, losses and optimizer steps as they happen. Out: `RecordedStep`s handed to the `StepPolicy`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nandoctor.capture.async_flags import Flag, any_nonfinite, reduce_over_ranks
from nandoctor.capture.observer import Observer
from nandoctor.capture.step import RecordedStep, pack_call
from nandoctor.capture.step_policy import StepPolicy
from nandoctor.dumps.trees import pack
from nandoctor.errors import NonFiniteTrainingError
from nandoctor.torch_compat import read_loss_scale

LOG = logging.getLogger("nandoctor")
_MAX_CALLS = 16
"""Forwards in train mode that nobody watches are no step: of these no more are kept."""


class StepTracker:
    """The step under way, `current`, and those that wait for a device to say how they went.

    `on_stop` is called before `NonFiniteTrainingError` is raised. `epoch` and `next_step` number what begins next.
    """

    def __init__(self, observer: Observer, policy: StepPolicy, scaler: Any, on_stop: Callable[[], None]) -> None:
        self.current: RecordedStep | None = None
        self.epoch: int | None = None
        self.next_step = 0
        self.optimizers: list[Optimizer] = []
        self._observer, self._policy, self._scaler, self._on_stop = observer, policy, scaler, on_stop
        self._pending: list[RecordedStep] = []
        self._parameters = {id(parameter) for parameter in observer.model.parameters()}
        self._owned: dict[int, bool] = {}

    def make_step(self, batch: Any = None, *, explicit: bool) -> RecordedStep:
        """A step with the next number and the loss scale as it is now."""
        number = self.next_step
        self.next_step += 1
        scale, version = read_loss_scale(self._scaler)
        return RecordedStep(
            step=number, epoch=self.epoch, explicit=explicit, batch=batch, scale=scale, scale_version=version
        )

    def start_step(self, following: RecordedStep | None, *, final: bool = False) -> None:
        """End the current step and make `following` the current one; then decide on those that can be.

        Raises:
            NonFiniteTrainingError: the policy stops the training.
        """
        step, self.current = self.current, following
        if step is not None and step.flags:
            scale, version = read_loss_scale(self._scaler)
            if version != step.scale_version and not step.stepped:
                # The scaler was updated and no optimizer was called: the scaler has waited for the gradients by now.
                step.skipped = scale is not None and step.scale is not None and bool(scale < step.scale)
            self._pending.append(step)
        self.flush_pending(final=final)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note a call of the model; True where it is the first of its step.

        Raises:
            NonFiniteTrainingError: this begins a step, and the policy stops the training for one before it.
        """
        step = self.current
        explicit = step is not None and step.explicit
        if not torch.is_grad_enabled() or not (module.training or explicit):
            return False
        if step is None or (not explicit and (step.flags or step.passed or len(step.calls) >= _MAX_CALLS)):
            step = self.make_step(explicit=False)
            self.start_step(step)
        is_first = step.before is None
        if is_first:
            step.before = self._observer.look()
        else:
            step.between.append(self._observer.look_between())
        step.calls.append(pack_call(args, kwargs))
        step.num_running += 1
        return is_first

    def after_forward(self, output: Any) -> RecordedStep | None:
        """Note what a call of the model returned; the step that it belongs to, None for none."""
        step = self.current
        if step is None or not step.num_running:
            return None
        step.num_running -= 1
        step.returned.append(pack(output, "output"))
        return step

    def watch(self, step: RecordedStep, loss: torch.Tensor | None, *, ask_all: bool) -> None:
        """Flag a non-finite loss (or output, without a loss), and see what the forward did to the buffers."""
        step.loss = step.loss if loss is None else loss.detach()
        flag = any_nonfinite(step.outputs() if loss is None else [loss])
        if flag is None:
            flag = torch.zeros((), dtype=torch.bool, device=self._observer.device)
        step.flags.append(Flag(reduce_over_ranks(flag, ask_all=ask_all)))
        if step.before is not None:
            self._observer.learn(step.before)

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Read the flags before an optimizer spoils the weights that the dump needs.

        A plain optimizer gets here when its scaler has waited for the gradients already, and not at all where it skips.
        A fused one gets here always, with the scaler's own flag, and leaves the weights alone by itself.
        """
        step = self.current
        if step is None:
            return
        if not self._owns(optimizer):
            step.passed = True
            return
        if not step.flags and step.returned:
            self.watch(step, None, ask_all=True)
        found = getattr(optimizer, "found_inf", None)
        step.skip = Flag(found) if isinstance(found, torch.Tensor) else None
        if not step.waits_for_skip:
            self.flush_pending()
            if step.loss_nonfinite or step.was_skipped:
                self._decide(step)
        step.stepped = True
        for waiting in (*self._pending, step):
            waiting.num_updates += 1

    def flush_pending(self, *, final: bool = False, may_stop: bool = True) -> None:
        """Decide on finished steps, except for a last one of which the device has yet to say if it was skipped.

        Raises:
            NonFiniteTrainingError: the policy stops the training.
        """
        while self._pending:
            step = self._pending[0]
            is_last = len(self._pending) == 1
            if is_last and not final and step.waits_for_skip and not step.loss_nonfinite:
                return
            if not step.decided:
                self._decide(step, may_stop=may_stop)
            del self._pending[0]

    def on_exception(self) -> None:
        """Decide on everything that is left, without any error of the recorder's own: the loop has raised one."""
        step, self.current = self.current, None
        try:
            if step is not None and not step.flags and step.returned:
                self.watch(step, None, ask_all=False)  # the other ranks are not here to answer
            self._pending += [step] if step is not None and step.flags else []
            self.flush_pending(final=True, may_stop=False)
        except Exception as error:
            LOG.warning("nandoctor could not look at the last step (%s: %s).", type(error).__name__, error)

    def _owns(self, optimizer: Optimizer) -> bool:
        """True if the optimizer trains a parameter of this model; asked once for each optimizer."""
        key = id(optimizer)
        if key not in self._owned:
            trained = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            self._owned[key] = any(parameter in self._parameters for parameter in trained)
            self.optimizers += [optimizer] if self._owned[key] else []
        return self._owned[key]

    def _decide(self, step: RecordedStep, *, may_stop: bool = True) -> None:
        try:
            self._policy.decide(step, may_stop=may_stop)
        except NonFiniteTrainingError:
            self._pending.clear()
            self.current = None
            self._on_stop()
            raise
