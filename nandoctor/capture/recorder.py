"""`Recorder`: watches a training loop for non-finite steps, saves them completely, and stops the run by a rule."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nandoctor.capture.dump_contents import Training, fit_into
from nandoctor.capture.environment import called_model, unwrap_model
from nandoctor.capture.hooks import AFTER_UPDATE, BEFORE_UPDATE, Hook, attach, do_nothing, scout_autocast
from nandoctor.capture.step import Observer, RecordedStep, held
from nandoctor.capture.step_policy import StepPolicy
from nandoctor.capture.step_tracker import StepTracker
from nandoctor.capture.tensors import can_join, refuse_unknown
from nandoctor.capture.updates import UNDO_NBYTES
from nandoctor.dumps.packing import pack
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.errors import NanDoctorError
from nandoctor.source_files import is_interactive
from nandoctor.torch_compat import unwrap

LOG = logging.getLogger("nandoctor")
_NOT_PROVED = ("the weights of the step", "the modules of the step")


@dataclass(eq=False, repr=False)
class Recorder:
    """A recorder that keeps each step of a training until its loss is known to be finite, and saves it if it is not.

    Make `recorder = Recorder(model, scaler=scaler)`, and call `recorder.watch(loss, batch)` before the backward pass.
    A step then begins with the model's forward in train mode and ends with the next one. `with recorder.step(batch):`
    marks a step explicitly, and also saves a non-finite step that ends in an exception.

    A file is written at the first non-finite step of an episode, and when training is stopped.

    Args:
        model: the model that the loop calls, which may be compiled or wrapped for distributed training.
        folder: the folder for the files.
        scaler: the GradScaler, if there is one.
        loss: a function (output, batch) -> scalar, for the replay of the backward pass.
        builder: the function that built the model, if it was not built by its class with `arguments`.
        arguments: the arguments that the model's class, or `builder`, was called with.
        threshold: stop when more than this share of the last `window` steps was non-finite; 0 stops at once, 1 never.
            Steps that the scaler skips count only if its scale has fallen below 1.
        window: a number of steps.
        keep: number of this run's files to keep; the oldest is deleted, skipped steps first.
        max_nbytes: most bytes of a file (default: 8 GiB). Weights that do not fit are left out, and the file says so.
        on_save: called with (path, event) after each file.
        undo_nbytes: copy the weights before each update, and before each forward what no optimizer writes, if these
            have at most this many bytes (default: 1 GiB), so that a step is saved as it began.
        training_step: for integrations: True if a step is a call of the model's `training_step`, not of its forward.
        from_output: for integrations: True if the loss is in the model's output.

    Raises:
        NanDoctorError: a setting is invalid, or the model keeps its weights in flat pieces (FSDP1).
    """

    model: nn.Module
    _: KW_ONLY
    folder: str | os.PathLike[str] = "dumps"
    scaler: Any = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    builder: Callable[..., nn.Module] | None = None
    arguments: Mapping[str, Any] | None = None
    threshold: float = 0.1
    window: int = 100
    keep: int = 5
    max_nbytes: int = 8 << 30
    on_save: Callable[[Path, Mapping[str, Any]], object] | None = None
    undo_nbytes: int = UNDO_NBYTES
    training_step: bool = False
    from_output: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, Mapping | None):
            raise NanDoctorError(
                f"Recorder takes arguments by name, not as {type(self.arguments).__name__}.",
                remedy='Give them by name: arguments={"width": 64}.',
            )
        if not 0 <= self.threshold <= 1 or min(self.window, self.keep) < 1:
            raise NanDoctorError(
                f"Recorder does not accept threshold={self.threshold}, window={self.window} and keep={self.keep}.",
                remedy="threshold is a share from 0 to 1 (0 stops at once, 1 never); window and keep are 1 or more.",
            )
        self._handles = ExitStack()
        self._policy = StepPolicy(settings=self, make_contents=self._make_contents)
        self._is_idle = False
        self._warned: set[str] = set()
        try:
            self._follow_model()
        except NanDoctorError:
            raise
        except Exception as error:  # the user's objects may raise anything
            self._warn(f"this training is not recorded ({type(error).__name__}: {error}). Training goes on.")
            self._handles.close()
            self._is_idle = True
            self._track(Observer(nn.Module(), self.undo_nbytes), None)
        atexit.register(self._at_exit)  # for a script that ends in an error before it calls close
        self._handles.callback(atexit.unregister, self._at_exit)

    def _follow_model(self) -> None:
        refuse_unknown(self.model)
        self.model = called_model(self.model)
        observer = Observer(unwrap_model(self.model), self.undo_nbytes)
        # A disabled scaler neither scales nor skips.
        scaler = self.scaler if getattr(self.scaler, "is_enabled", lambda: True)() else None
        self._training = Training(self, observer)
        self._track(observer, scaler)
        self._handles.callback(BEFORE_UPDATE.add(Hook(self._tracker.before_step)))
        self._handles.callback(AFTER_UPDATE.add(Hook(self._tracker.after_step)))
        if not self.training_step:
            attach(self.model, self._before_forward, self._after_forward, self._handles)
            if "forward" in vars(observer.model):  # replaced, as Accelerate does
                self._handles.push(scout_autocast(observer))
            return
        for name, child in observer.model.named_children():
            attach(child, do_nothing, functools.partial(self._keep_inside, name), self._handles)

    def _track(self, observer: Observer, scaler: Any) -> None:
        self._observer = observer
        self._tracker = StepTracker(observer, self._policy, scaler, on_stop=self._handles.close)
        tracker = self._tracker
        used = (tracker.begin, tracker.start_step, tracker.add_call, tracker.on_exception, self._check_loss)
        self._begin, self._start_step, self._add_call, self._on_exception, self._check = [
            Hook(function) for function in used
        ]

    @property
    def written(self) -> tuple[Path, ...]:
        """The files of this run that still exist, oldest first."""
        return tuple(self._policy.written)

    def number_next(self, step: int, epoch: int | None = None) -> None:
        """Set the number of the step that begins next, and the epoch of the steps from there on."""
        self._tracker.next_step, self._tracker.epoch = step, epoch

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Recorder]:
        """Mark the beginning and the end of a step, or of one of its micro-batches: `with recorder.step(batch):`.

        Args:
            batch: the data that the loss is computed from: tensors and plain data in dicts, lists and tuples.

        Raises:
            NonFiniteTrainingError: the stop rule applies after this step or the one before.
        """
        self.begin(batch)
        try:
            yield self
        except BaseException as error:
            self._on_exception(error)
            raise
        self.end()

    def begin(self, batch: Any = None) -> None:
        """Begin a step, if `with recorder.step(batch):` does not fit in; `end` or the next `begin` ends it.

        They do not see an exception that the loop or the backward pass raises; that of a forward they do. The batch and
        what is raised are as for `step`.
        """
        self._begin(batch, explicit=True)

    def watch(self, loss: torch.Tensor | None = None, batch: Any = None) -> None:
        """Check this step's loss; call this before the backward pass. It does not wait for the device.

        Under torch.distributed the ranks exchange their results here, so every rank must call it.

        Args:
            loss: a scalar, not yet multiplied by the loss scale; None to check the model's output.
            batch: as for `step`, if it was not passed there.
        """
        if self._is_idle:
            return
        step = self._tracker.current
        if self._tracker.unwatched_eval and not self._observer.model.training:
            self._warn(
                "watch was called after a forward in eval mode, which is not a training step, so nothing was checked. "
                "To record an evaluation, put each of its steps into `with recorder.step(batch):`."
            )
            return
        if step is None or self._tracker.is_over(step):
            self._start_step(None)
            step = None
        if step is None or not step.calls:
            self._warn(
                "the model itself, model(...), was not called in a step, which cannot be saved. Call watch between the "
                "forward and the update. If the loop calls other methods of the model, let `forward` call them; if it "
                "goes on with another model, give that to a new Recorder."
            )
            if step is None or loss is None:
                return
        step.batch = step.batch if batch is None else held(batch)
        self._check(step, loss)

    def _check_loss(self, step: RecordedStep, loss: Any) -> None:
        self._tracker.watch(step, self._as_tensor(loss), ask_all=True)
        if self.loss is None and loss is not None and not self.training_step and step.find_loss() is None:
            self._warn(
                "the loss is computed outside of the model, so a replay cannot check it or its gradients. Give the "
                "recorder a function at a file's top level: loss=loss_of, with def loss_of(output, batch): return ..."
            )
        self._tracker.decide_known(step)

    def _as_tensor(self, loss: Any) -> torch.Tensor | None:
        """Return the loss as a tensor; None, with a warning in the log, if it is not a number."""
        if loss is None or (can_join(loss) and not loss.is_meta) or is_dense(loss):
            return None if loss is None else unwrap(loss)  # inside torch.func.vmap the losses of all samples
        try:
            return torch.tensor(float(loss))
        except Exception:  # a user's object may raise anything
            self._warn(
                f"watch was given a {type(loss).__name__}, which is not a loss, and checked the model's output "
                "instead. Give it the tensor that backward is called on."
            )
            return None

    def _warn(self, message: str) -> None:
        """Log a message, at most once."""
        if message not in self._warned:
            self._warned.add(message)
            LOG.warning("nandoctor.Recorder: %s", message)

    def save(self, reason: str = "requested") -> Path | None:
        """Save the current step, finite or not: for a spike of the loss, or an odd batch.

        The file has the state from before the step; after `optimizer.step()` only if the weights were copied
        (`undo_nbytes`).

        Args:
            reason: saved in the file.

        Returns:
            The file; None if it could not be written, or there is no current step, and the log says why.
        """
        if self._is_idle:
            return None
        if self._tracker.current is None:
            self._warn(
                "there is no step to save. Call save between the forward and the next step; in an evaluation, inside "
                "`with recorder.step(batch):`."
            )
            return None
        return Hook(self._policy.save)(self._tracker.current, reason)  # type: ignore[no-any-return]

    def end(self) -> None:
        """End the step that `begin` began. Raises NonFiniteTrainingError, as for `step`."""
        step = self._tracker.current
        if step is not None and not step.flags and (step.returned or not step.calls):
            self.watch()
        self._start_step(None)

    def close(self) -> None:
        """Check the last step, and remove all hooks. Raises NonFiniteTrainingError, as for `step`."""
        with self._handles:
            self._start_step(None, final=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
            return
        with self._handles:
            self._on_exception(error)

    def _at_exit(self) -> None:
        self._on_exception(None if is_interactive() else getattr(sys, "last_value", None))

    def call_training_step(self, *args: Any, **kwargs: Any) -> None:
        """Note that `training_step` is about to be called with these arguments.

        For integrations, after `begin` and under the autocast that it will run under.
        """
        if self._tracker.current is not None:
            self._add_call(self._tracker.current, args, kwargs)

    def _keep_inside(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        step = self._tracker.current
        if step is not None and step.calls and output is not None and torch.is_grad_enabled():
            step.inside[name] = pack(output, f"output.{name}")

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        step = self._tracker.before_forward(module, args, kwargs)
        for lost in step.calls[0].notes[:1] if step is not None else ():
            what = f"a file cannot hold {lost}; a replay passes None instead. If the model needs it, replay with --call"
            self._warn(f"{what} FILE.py:NAME, a function (model, batch) that makes it again.")

    def _after_forward(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        step = self._tracker.after_forward(output)
        if step is None or not self.from_output:
            return
        loss = step.own_loss()
        if loss is None:
            self._warn(
                "the loss is not in the model's output, so only the output is checked. Pass the Trainer that computes "
                "it to the callback before the training, recorder.watch(trainer), and make that with a function at a "
                "file's top level: RecorderCallback(loss=loss_of), with def loss_of(output, batch): return ..."
            )
        self.watch(loss)

    def _make_contents(self, step: RecordedStep, reason: str, event: str) -> Mapping[str, Any]:
        has_optimizer = bool(self._tracker.trainers.optimizers)
        contents = self._training.describe(step, reason, event, has_optimizer=has_optimizer)
        for note in contents["left_out"]:
            if note.startswith(_NOT_PROVED):
                self._warn(f"{note}. A replay may not be of the step that failed.")
        return fit_into(contents, self.max_nbytes)
