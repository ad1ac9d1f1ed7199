"""`Recorder`: watches a training loop for non-finite steps, saves them whole, and stops the run when it must."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nandoctor.capture.deepspeed import find_engine
from nandoctor.capture.dump_contents import Training, describe, leave_weights
from nandoctor.capture.dump_folder import DumpFolder
from nandoctor.capture.hooks import AFTER_UPDATE, BEFORE_UPDATE, Hook, attach, scout_autocast
from nandoctor.capture.joined import can_join
from nandoctor.capture.observer import Observer
from nandoctor.capture.recorder_settings import RecorderSettings
from nandoctor.capture.sharding import refuse_flat_weights
from nandoctor.capture.source_info import (
    ProjectSources,
    advise_loss,
    class_of,
    describe_loss,
    describe_source,
    flags_for_loss,
    plan_rebuild,
    unwrap_model,
)
from nandoctor.capture.step import RecordedStep, held, pack_call
from nandoctor.capture.step_policy import StepHistory, StepPolicy, StepResult, StopRule
from nandoctor.capture.step_tracker import StepTracker
from nandoctor.dumps.packing import pack
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.errors import NanDoctorError, NonFiniteTrainingError
from nandoctor.replaying.project import stop_import
from nandoctor.source_files import is_interactive
from nandoctor.text import join_first
from nandoctor.torch_compat import unwrap

LOG = logging.getLogger("nandoctor")


class Recorder(RecorderSettings):
    """Keeps each step of a training until its loss is known to be finite, and writes it to a file where it is not.

    `recorder = Recorder(model, scaler=scaler)`, and in the loop `recorder.watch(loss, batch)` before the backward pass.
    A step then begins with the model's forward in train mode and ends with the next one; `with recorder.step(batch):`
    around the whole step says it outright, and also saves a non-finite step that ends in an exception of the loop.

    A file is written at the first non-finite step of an episode, and when training is stopped.

    Args:
        model: the one that the loop calls: compiled, or wrapped for distribution.
        folder: where the files go.
        scaler: the GradScaler, if there is one.
        loss: a function (output, batch) -> scalar, or its SPEC, for the replay of the backward pass.
        builder: the function that built the model, where its class was not called with `arguments`.
        arguments: what the model's class, or `builder`, was called with.
        threshold: stop when more than this share (0 to 1) of the last `window` steps was non-finite. Steps that the
            scaler skips count only where its scale has fallen below 1.
        window: a number of steps.
        in_a_row: stop after so many such steps in a row, too.
        keep: number of this run's files to keep; the oldest makes way.
        max_nbytes: bytes of the largest file (default: 8 GiB). What has no room is left out, and named in the file.
        keep_optimizer: True to save the optimizer's state as well.
        spike: also save a step whose finite loss is over so many times the median of the last `window`.
        on_save: called with (path, event) after each file.
        weights: the checkpoint of weights that have no room: its path, or a function that returns the last one's.
        undo_nbytes: copy weights of up to so many bytes (default: 1 GiB) before each update, so that an update that
            spoils them can be saved.
        method: for integrations: the model's method that makes a step, where its forward does not.
        ambient: for integrations: opens the autocast that `method` will run under.
        from_output: for integrations: True where the loss is in the model's own output.

    Raises:
        NanDoctorError: a setting cannot have its value, or the model keeps flat weights (FSDP1, ZeRO-3).
    """

    def __post_init__(self) -> None:
        stop_import()
        super().__post_init__()
        refuse_flat_weights(self.model)
        self._engine = find_engine(self.model)
        self._observer = Observer(unwrap_model(self._called), self.undo_nbytes)
        self._training, self._flags = self._describe_training()
        self._handles = ExitStack()
        self._policy = StepPolicy(
            StepHistory(StopRule(threshold=self.threshold, window=self.window, in_a_row=self.in_a_row)),
            DumpFolder(Path(self.folder), keep=self.keep, max_nbytes=self.max_nbytes),
            self._make_contents,
            spike=self.spike,
            on_save=self.on_save,
            replay_flags=self._find_flags,
        )
        self._tracker = StepTracker(
            self._observer,
            self._policy,
            self._training.scaler,
            undo_nbytes=self.undo_nbytes,
            on_stop=self._handles.close,
            count=None if self._engine is None else self._engine.count,
        )
        hooked = (self._tracker.start_step, self._tracker.watch, self._tracker.on_exception)
        self._start_step, self._look_at, self._on_exception = [Hook(function) for function in hooked]
        self._scouted = False
        self._warned: set[str] = set()
        self._attach()
        atexit.register(self._at_exit)  # for a script that ends in an error before it closes this
        self._handles.callback(atexit.unregister, self._at_exit)

    def _describe_training(self) -> tuple[Training, str | None]:
        """What all files have in common, and the flags that a replay will need; the log says how to do without.

        None where only this notebook can replay them.
        """
        model, builder, arguments = self._observer.model, self.builder, self.arguments or {}
        if isinstance(builder, functools.partial) and not builder.args:
            arguments = {**builder.keywords, **arguments}
            builder = builder.func
        source = describe_source(builder or class_of(model))
        built = builder is not None and not isinstance(builder, type)
        loss = None if self.loss is None else describe_loss(self.loss)
        flags, advice = plan_rebuild(model, source, arguments, built=built)
        flags = None if flags is None else flags + flags_for_loss(loss)
        for line in (*advice, *advise_loss(self.loss, loss)):
            LOG.warning("nandoctor.Recorder: %s", line)
        training = Training(
            observer=self._observer,
            model=source,
            loss=loss,
            arguments=arguments,
            built=built,
            method=self.method,
            files=ProjectSources(model, source, loss),
            scaler=self._find_scaler(),
            keep_optimizer=self.keep_optimizer,
        )
        return training, flags

    @property
    def _called(self) -> nn.Module:
        """What the hooks are put on; within an engine its module, which is given what the engine has cast."""
        return self.model if self._engine is None else self._engine.model

    def _find_scaler(self) -> Any:
        """What scales the loss, if anything: a disabled scaler does not, and lets every update pass."""
        if self._engine is not None:
            return self._engine if self._engine.scales else None
        return self.scaler if getattr(self.scaler, "is_enabled", lambda: True)() else None

    @property
    def history(self) -> StepHistory:
        """The run so far: `num_steps`, `num_bad_losses`, `num_spoiled` and `num_skipped`."""
        return self._policy.history

    @property
    def written(self) -> tuple[Path, ...]:
        """The files of this run that are still there, oldest first."""
        return tuple(self._policy.folder.written)

    @property
    def epoch(self) -> int | None:
        """The epoch that the next steps are recorded with; may be set."""
        return self._tracker.epoch

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._tracker.epoch = epoch

    @property
    def next_step(self) -> int:
        """The number of the step that begins next; may be set."""
        return self._tracker.next_step

    @next_step.setter
    def next_step(self, number: int) -> None:
        self._tracker.next_step = number

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Recorder]:
        """Mark the beginning and the end of a step, or of one micro-batch of it: `with recorder.step(batch):`.

        Args:
            batch: what the loss is made from: tensors and plain data in dicts, lists and tuples.

        Raises:
            NonFiniteTrainingError: the stop rule holds after this step, or after the one before.
        """
        self.begin(batch)
        try:
            yield self
        except NonFiniteTrainingError:
            raise
        except BaseException as error:
            self._on_exception(error)
            raise
        self.end()

    def begin(self, batch: Any = None) -> None:
        """Begin a step, where `with recorder.step(batch):` does not fit; `end`, or the next `begin`, ends it.

        Args:
            batch: as for `step`.

        Raises:
            NonFiniteTrainingError: as `step`.
        """
        self._start_step(Hook(self._tracker.make_step)(batch, explicit=True))

    def watch(self, loss: torch.Tensor | None = None, batch: Any = None) -> None:
        """Look at this step's loss; call it before the backward pass. The answer is not waited for.

        Under torch.distributed all ranks ask each other here, so all must call it.

        Args:
            loss: a scalar, not yet multiplied by the loss scale; None to look at the model's output.
            batch: as for `step`, where that was not told.

        Raises:
            NanDoctorError: no forward was seen since the last step.
        """
        step = self._tracker.current
        if step is None:
            raise NanDoctorError(
                "The recorder has seen no forward of its model in train mode since the last step.",
                remedy="Call recorder.watch after the forward, and give Recorder the very model that the loop calls; "
                "or put the step into `with recorder.step(batch):`.",
            )
        if self._tracker.unwatched_eval and not self._observer.model.training:
            self._warn(
                "watch was called after a forward in eval mode, which is no step of the training, and looked "
                "at nothing. To record evaluations, put each into `with recorder.step(batch):`."
            )
            return
        step.batch = step.batch if batch is None else held(batch)
        self._look_at(step, self._as_tensor(loss), ask_all=True)
        if step.borrowed and step.lent is None:
            self._warn(
                "torch.func.functional_call gives the model other weights at each call, with which no replay can call "
                "it. Write the step up to the loss as the forward of a module that holds the model, record that "
                "module, and give loss=loss_of, with def loss_of(output, batch): return output"
            )
        elif loss is not None and not self.method:
            self._advise_loss(step)

    def _as_tensor(self, loss: Any) -> torch.Tensor | None:
        """The loss; None for what is no number, and a line in the log."""
        if loss is None or (can_join(loss) and not loss.is_meta) or is_dense(loss):
            return None if loss is None else unwrap(loss)  # of torch.func.vmap those of all samples
        try:
            return torch.tensor(float(loss))
        except Exception:  # what an object of the training's raises
            self._warn(
                f"watch was given a {type(loss).__name__}, which is no loss, and looked at the model's output "
                "instead. Give it the tensor that backward is called on."
            )
            return None

    def _warn(self, message: str) -> None:
        """Log a message once."""
        if message not in self._warned:
            self._warned.add(message)
            LOG.warning("nandoctor.Recorder: %s", message)

    def save(self, reason: str = "requested") -> Path | None:
        """Save the step under way, whatever its values are: a spike of the loss, an odd batch.

        The state is that from before the step; after `optimizer.step()`, as far as the weights were copied
        (`undo_nbytes`).

        Args:
            reason: stands in the file.

        Returns:
            The file; None if it could not be written, and the log says why.

        Raises:
            NanDoctorError: no step is under way.
        """
        if self._tracker.current is None:
            raise NanDoctorError(
                "There is no step to save: the recorder has seen no forward of its model in train mode.",
                remedy="Call recorder.save between the forward and the next step; in an evaluation, inside "
                "`with recorder.step(batch):`.",
            )
        return Hook(self._policy.save)(self._tracker.current, reason)  # type: ignore[no-any-return]

    def end(self) -> None:
        """End the step that `begin` began.

        Raises:
            NonFiniteTrainingError: as `step`.
        """
        step = self._tracker.current
        if step is not None and not step.flags and step.returned and not step.passed:
            self.watch()
        self._start_step(None)

    def close(self) -> None:
        """Look at the last step, and take all hooks off.

        Raises:
            NonFiniteTrainingError: as `step`.
        """
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

    def call_method(self, *args: Any, **kwargs: Any) -> None:
        """Note that `method` is about to be called with these arguments; for integrations, after `begin`."""
        assert self._tracker.current is not None, "begin comes first"
        step = self._tracker.end_last(self._tracker.current)
        with self.ambient():
            step.before = self._observer.look()
        step.calls.append(pack_call(args, kwargs))

    def _attach(self) -> None:
        tracker = self._tracker
        if self._engine is not None:
            before, after = Hook(tracker.before_update), Hook(tracker.after_engine_step)
            self._handles.callback(self._engine.wrap_step(before, after))
        else:
            self._handles.callback(BEFORE_UPDATE.add(Hook(tracker.before_step)))
            self._handles.callback(AFTER_UPDATE.add(Hook(tracker.after_step)))
        if not self.method:
            attach(self._called, self._before_forward, self._after_forward, self._handles)
            return
        for name, child in self._observer.model.named_children():
            attach(child, None, functools.partial(self._keep_inside, name), self._handles)

    def _keep_inside(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        step = self._tracker.current
        if step is not None and step.calls and torch.is_grad_enabled():
            step.inside[name] = pack(output, f"output.{name}")

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a step; the first time, look for autocast within a forward that somebody wrapped (Accelerate does)."""
        if not self._tracker.before_forward(module, args, kwargs):
            return
        model, step, observer = self._observer.model, self._tracker.current, self._observer
        assert step is not None
        assert step.before is not None
        for lost in step.calls[0].left_out[:1]:
            told = f"no file can hold {lost}; a replay has None for it. If the model needs it, replay with --call"
            self._warn(f"{told} FILE.py:NAME, a function (model, batch) that makes it anew.")
        if self._scouted or step.before.autocast["enabled"] or "forward" not in vars(model):
            return
        self._scouted = True
        note = functools.partial(setattr, observer, "autocast_inside")
        self._handles.push(scout_autocast([*model.modules()][1:], note, observer.device.type))

    def _after_forward(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        step = self._tracker.after_forward(output)
        if step is None or not self.from_output:
            return
        self._look_at(step, step.own_loss(), ask_all=True)
        self._advise_loss(step)

    def _advise_loss(self, step: RecordedStep) -> None:
        """Tell how a replay would get the loss, where it is computed outside of the model."""
        if self.loss is None and step.loss_place is None:
            self._warn(
                "the loss is computed outside of the model, so a replay will see neither it nor its gradients. Give "
                "the recorder a function at a file's top level: loss=loss_of; def loss_of(output, batch): return ..."
            )

    def _find_flags(self) -> str | None:
        """What has to follow `nandoctor replay FILE`; more than was known at first, where the model was rebuilt."""
        reshaped = self._observer.find_reshaped()
        if not reshaped:
            return self._flags
        self._warn(
            f"the model's parameters are no longer those that training began with ({join_first(reshaped, 3)}), so a "
            "replay cannot build it by itself. Write a function that returns the model as it is now for --model."
        )
        return " --model FILE.py:NAME"

    def _make_contents(self, step: RecordedStep, result: StepResult, event: str) -> Mapping[str, Any]:
        optimizers = self._tracker.trainers.optimizers
        contents = describe(self._training, step, result, event, history=self.history, optimizers=optimizers)
        return leave_weights(contents, self.weights, self.max_nbytes)
