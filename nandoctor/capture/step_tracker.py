"""Track a training step from its first forward to the optimizer's update, and pass it to the policy."""

from __future__ import annotations

import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nandoctor.capture.hooks import Hook
from nandoctor.capture.step import RAISED, Observer, RecordedStep, held, pack_call
from nandoctor.capture.step_policy import StepPolicy
from nandoctor.capture.tensors import Flag, can_join, flag_magnitude, largest_magnitude
from nandoctor.capture.updates import Trainers, Update
from nandoctor.dumps.packing import copied, pack
from nandoctor.errors import NonFiniteTrainingError
from nandoctor.torch_compat import backward_under_way, is_wrapped, read_loss_scale, tree_tensors

LOG = logging.getLogger("nandoctor")

_MAX_UNMARKED_CALLS = 16
"""Most calls of a step whose beginning the loop does not mark: forwards without `watch` may go on forever."""
_ANOMALY = "returned nan values in its"  # what `torch.autograd.detect_anomaly` raises


class StepTracker:
    """A tracker of the step in progress, `current`, and of finished steps whose flags are still on the device.

    Methods that end or decide a step raise `NonFiniteTrainingError` if the policy stops the training, after they called
    `on_stop`. `epoch` and `next_step` are those of the next step. `unwatched_eval`: the last forward was in eval mode,
    and not a step.
    """

    def __init__(self, observer: Observer, policy: StepPolicy, scaler: Any, *, on_stop: Callable[[], None]) -> None:
        self.current: RecordedStep | None = None
        self._ended: RecordedStep | None = None  # its update may follow after the block that marked it
        self.epoch: int | None = None
        self.next_step, self.unwatched_eval = 0, False
        self._observer, self._policy, self._scaler, self._on_stop = observer, policy, scaler, on_stop
        self._pending: list[RecordedStep] = []
        self.trainers = Trainers(observer.model, observer.undo_nbytes)
        self._last = (-1, 0)
        self._scale_version: int | None = None
        self._overwrites = False  # True once a forward wrote to its inputs
        self._accumulates, self._process = False, os.getpid()
        self._handled = id(None)
        self._before_update, self._after_step = Hook(self.before_update), Hook(self.after_step)

    @property
    def _latest(self) -> RecordedStep | None:
        """The step whose update comes next: the current one, or the one whose block has just ended."""
        return self.current or self._ended

    def begin(self, batch: Any = None, *, explicit: bool) -> RecordedStep:
        """End the current step, and begin one with the next number, or the next micro-batch of the last."""
        scale, version = self._read_scale()
        number, micro_batch = self._last
        probe = self.trainers.probe
        if self.current is not None and not self.current.flags:
            pass  # `watch` was not called, so it does not count as a step, and its number is free
        elif self._accumulates and version == self._scale_version and probe is not None and probe.grad is not None:
            micro_batch += 1  # there are gradients, and no optimizer or scaler was updated since the last step
        else:
            micro_batch = micro_batch + 1 if self.next_step == number else 0
            number = self.next_step
        self._last, self.next_step = (number, micro_batch), number + 1
        self._accumulates, self._scale_version = probe is not None, version
        step = RecordedStep(
            step=number,
            micro_batch=micro_batch,
            epoch=self.epoch,
            explicit=explicit,
            batch=held(batch),
            scale=scale,
            scale_version=version,
        )
        self.start_step(step)
        return step

    def _read_scale(self) -> tuple[Flag | None, int | None]:
        """Return the loss scale as a flag, and how often the scaler was updated; None without a scaler."""
        scale, version = read_loss_scale(self._scaler)
        return None if scale is None else Flag(scale), version

    def start_step(self, following: RecordedStep | None, *, final: bool = False) -> None:
        """End the current step and make `following` the current one; then decide on the steps that are ready."""
        self._forget_if_forked()
        step, ended = self.current, self._ended
        self.current, self._ended = following, None
        self._finish(ended, final=final)
        is_over = following is not None or final
        if step is not None and not (is_over or step.without_grad or self._has_all_updates(step)):
            self._ended = step
        else:
            self._finish(step, final=final)
        self.flush_pending(wait=final)

    def _finish(self, step: RecordedStep | None, *, final: bool = False) -> None:
        """Measure what the step left, and queue it for its decision."""
        if step is None or not step.flags:
            return
        scale, version = self._read_scale()
        if version != step.scale_version and scale is not None and step.scale is not None:
            # Reading does not wait if an optimizer was not called: the scaler has already waited for the gradients.
            is_known = not scale.on_device or not self._has_all_updates(step)
            step.skipped = step.skipped or (is_known and scale.values() < step.scale.values())
        if self._scaler is None:
            self._look_at_gradients(step, over_ranks=self._observer.sharded and not final)
        elif step.awaits_gradients:  # what is added to non-finite ones stays so, and the scaler will skip it
            gradients = self.trainers.find_all().gradients()
            step.skip = Flag(0.0 if gradients is None else ~torch.as_tensor(gradients).isfinite())
        self._note_write(step)
        self._pending.append(step)

    def _has_all_updates(self, step: RecordedStep) -> bool:
        """Return True if every optimizer was called in the step."""
        return len(step.updates) >= max(1, len(self.trainers.optimizers))

    def is_over(self, step: RecordedStep) -> bool:
        """Return True if the step was watched, and all its updates were made."""
        return not step.explicit and bool(step.flags and step.updates) and self._has_all_updates(step)

    def _note_write(self, step: RecordedStep) -> None:
        """Note that the loop itself has written weights between the step's forward and its first update."""
        if not step.updates and self._observer.was_written(step.stamp):
            step.was_rewritten = True

    def _look_at_gradients(self, step: RecordedStep, *, over_ranks: bool) -> None:
        """Flag the gradients of a step if no update has measured them, and none will."""
        if step.awaits_gradients:
            gradients = self.trainers.find_all().gradients()
            step.accumulated = flag_magnitude(gradients, self._observer.device, ask_all=over_ranks)

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RecordedStep | None:
        """Note a call of the model; return its step if it is the first of that."""
        step, with_grad, self.unwatched_eval = self.current, torch.is_grad_enabled(), False
        if step is not None and step.calls and not step.without_grad and backward_under_way() >= 0:
            return None  # activation checkpointing recomputes its forward in the backward pass
        if step is not None and step.explicit:
            if not with_grad and (step.flags or (step.calls and not step.without_grad)):
                return None  # a validation inside the step
            if step.updates or (with_grad and step.without_grad):  # what made the batch is no part of the step
                step = self.begin(step.batch, explicit=True)
        elif not with_grad or not module.training:
            self.unwatched_eval = True
            return None
        elif step is None or step.flags or len(step.calls) >= _MAX_UNMARKED_CALLS:
            step = self.begin(explicit=False)
        if RAISED in step.flags:  # the loop has caught the error, and calls the model in another way
            step.flags.remove(RAISED)
            del step.calls[-1:], step.random[-1:]
        self._handled = id(sys.exc_info()[1])
        self.add_call(step, args, kwargs)
        step.without_grad = not with_grad
        step.running += 1
        return step if len(step.calls) == 1 else None

    def add_call(self, step: RecordedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a call of the model, and what it begins with."""
        observer, inputs = self._observer, pack_call(args, kwargs)
        step.before = step.before or observer.look()
        step.random.append(observer.generators.read(observer.device))
        step.has_lent_weights = step.has_lent_weights or observer.has_lent_weights
        step.calls.append(copied(inputs) if self._overwrites else inputs)

    def after_forward(self, output: Any) -> RecordedStep | None:
        """Note what a call of the model returned; return its step, or None. If it raised an error, find out why.

        The loop may catch the error, and nothing of it is left when the step ends.
        """
        step, error = self.current, sys.exc_info()[1]
        if step is None or not step.running:
            return None
        step.running -= 1
        if error is not None and id(error) != self._handled:  # the loop may have called the model to handle another
            if _is_for_nonfinite(error):
                step.flags.append(RAISED)
            return None
        self._overwrites = self._overwrites or step.calls[-1].overwritten
        step.returned.append(pack(output, "output"))
        if len(step.returned) == 1 and not (step.has_lent_weights or self._observer.sharded):  # FSDP moves weights
            step.stamp = self._observer.stamp()
        return step

    def watch(self, step: RecordedStep, loss: torch.Tensor | None, *, ask_all: bool) -> None:
        """Flag a non-finite loss; without a loss, a non-finite output."""
        if loss is None:
            largest = largest_magnitude(step.outputs())
        else:
            step.loss = loss.detach()
            is_usual = loss.numel() == 1 and loss.is_floating_point()
            largest = step.loss.abs() if is_usual else largest_magnitude([step.loss])
        step.flags.append(flag_magnitude(largest, self._observer.device, ask_all=ask_all))

    def decide_known(self, step: RecordedStep) -> None:
        """Decide on a step whose loss is known to be non-finite, before the loop overwrites what it is made of."""
        if not step.decided and not step.flags[-1].on_device and step.loss_nonfinite:
            self._decide(step)

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook before any optimizer's `step`; if it gets a closure, return the arguments with the closure wrapped."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # `self` comes first
        if not callable(closure):
            self.before_update(optimizer)
            return None
        wrapped = self._wrap_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _wrap_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure: the optimizer writes the weights after each call of it, and LBFGS calls it several times."""
        was_called = False

        def evaluate() -> Any:
            nonlocal was_called
            step, is_repeated, was_called = self._latest, was_called, True
            following = self.next_step
            if step is not None and is_repeated:
                self._after_step(optimizer)
                self.next_step = step.step  # one more micro-batch of the same step
            loss = closure()
            if step is not None and is_repeated:
                self.next_step = following
            self._before_update(optimizer)
            return loss

        return evaluate

    def before_update(self, optimizer: Optimizer) -> None:
        """Read the flags and copy the weights before an optimizer spoils the weights that the dump needs.

        With a scaler, a plain optimizer gets here after the scaler has waited for the gradients, and not if the step is
        skipped. A fused one always gets here, with the scaler's `found_inf`, and skips the update itself.
        """
        step, trained = self._latest, self.trainers.find(optimizer)
        if step is None or not trained.names:
            return
        if not step.flags and step.returned:
            self.watch(step, None, ask_all=True)
        found = getattr(optimizer, "found_inf", None)
        step.skip = Flag(found) if isinstance(found, torch.Tensor) else None
        self.flush_pending(wait=True)
        self._note_write(step)
        if all(update.trained is not trained for update in step.updates):
            update = Update(trained=trained, optimizer=optimizer, groups=list(map(dict, optimizer.param_groups)))
            if self._scaler is None:
                update.gradients = flag_magnitude(trained.gradients(), self._observer.device, ask_all=trained.sharded)
            update.undo = trained.keep()
            step.updates.append(update)
            self._decide_before_update(step, update)
        self._accumulates = False
        for waiting in (*self._pending, step):
            waiting.num_updates += 1

    def _decide_before_update(self, step: RecordedStep, update: Update) -> None:
        """Decide on a step that has already failed; wait for the gradients only without a copy of the weights."""
        if step.decided or (step.skip is not None and step.skip.on_device):
            return
        known = update.gradients is not None and (not update.gradients.on_device or update.undo is None)
        if step.loss_nonfinite or step.was_skipped or (known and step.gradients_nonfinite):
            self._decide(step)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook after any optimizer's `step`: flag weights that it left non-finite."""
        step = self._latest
        updates = [] if step is None or step.decided else step.updates
        update = next((update for update in updates if update.optimizer is optimizer), None)
        if step is None or update is None:
            return
        trained = update.trained
        update.weights = flag_magnitude(trained.weights(), self._observer.device, ask_all=trained.sharded)
        if not update.weights.on_device and update.weights.nonfinite:
            self._decide(step)

    def flush_pending(self, *, wait: bool = False, may_stop: bool = True) -> None:
        """Decide on finished steps; on those whose flags are still on the device only with `wait`."""
        while self._pending:
            step = self._pending[0]
            if not wait and not step.ready and not step.loss_nonfinite:
                return
            if not step.decided:
                self._decide(step, may_stop=may_stop)
            del self._pending[:1]

    def on_exception(self, error: BaseException | None = None) -> None:
        """Decide on all steps left: the loop may have raised an error because of gradients, before their update."""
        self._forget_if_forked()
        step, self.current, self._ended = self._latest, None, None
        if step is not None and not step.flags and step.calls:
            self._look_at_unwatched(step, error)
        self._finish(step, final=True)
        if step is not None and step.flags:
            if self._scaler is not None and isinstance(error, Exception):
                self._look_at_gradients(step, over_ranks=False)
            if isinstance(error, RuntimeError) and _ANOMALY in str(error):
                step.accumulated = Flag(float("nan"))
        self.flush_pending(wait=True, may_stop=False)

    def _look_at_unwatched(self, step: RecordedStep, error: BaseException | None) -> None:
        """Flag the output of a step that ended before its loss was watched; else find out why it raised."""
        self.watch(step, None, ask_all=False)  # the other ranks do not take part
        if step.loss_nonfinite or not isinstance(error, Exception):
            return
        if _is_for_nonfinite(error):
            step.flags.append(RAISED)
            return
        LOG.warning(
            "nandoctor.Recorder: step %d ended in an exception (%s) before its loss was known. It is not saved, since "
            "nothing in it is known to be non-finite.",
            step.step,
            type(error).__name__,
        )

    def _forget_if_forked(self) -> None:
        """In a forked child, forget the pending steps: they belong to the parent."""
        if self._process != os.getpid():
            self._process, self.current, self._ended, self._pending = os.getpid(), None, None, []

    def _decide(self, step: RecordedStep, *, may_stop: bool = True) -> None:
        try:
            self._policy.decide(step, may_stop=may_stop)
        except NonFiniteTrainingError:
            self._pending.clear()
            self.current = self._ended = None
            self._on_stop()
            raise


def _is_for_nonfinite(error: BaseException) -> bool:
    """Return True if the local variables of the code that raised it show a NaN or +Inf computed from weights.

    -Inf alone may come from a mask, if it is not in a single number. Also True for a FloatingPointError.
    """
    if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
        return False
    inside = [list(frame.f_locals.values()) for frame, _ in traceback.walk_tb(error.__traceback__)]
    for tensor in tree_tensors(inside):
        # A plain tensor of floats wider than a byte can be read without asking another rank.
        is_plain = can_join(tensor) and not (is_wrapped(tensor) or tensor.is_nested or tensor.is_meta)
        if is_plain and tensor.requires_grad and tensor.is_floating_point() and tensor.element_size() > 1:
            is_sound = tensor.isfinite() if tensor.numel() == 1 else (tensor < math.inf).all()
            if not bool(is_sound):
                return True
    return isinstance(error, FloatingPointError)
