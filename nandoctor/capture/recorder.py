"""`Recorder`: watches a training loop for non-finite steps, saves them whole, and stops the run when it must."""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nandoctor.capture.deepspeed import find_engine
from nandoctor.capture.dump_contents import ModelSources, Training, WeightsSource, describe, leave_weights
from nandoctor.capture.hooks import attach, never_harm, scout_autocast
from nandoctor.capture.observer import Observer
from nandoctor.capture.sharding import refuse_flat_weights
from nandoctor.capture.source_info import ProjectSources, class_of, describe_source, plan_rebuild, unwrap_model
from nandoctor.capture.step import RecordedStep, pack_call
from nandoctor.capture.step_policy import DumpFolder, OnSave, StepHistory, StepPolicy, StepResult, StopRule
from nandoctor.capture.step_tracker import StepTracker
from nandoctor.capture.updates import UNDO_NBYTES
from nandoctor.dumps.numpy_pickle import is_dense
from nandoctor.dumps.trees import pack
from nandoctor.errors import NanDoctorError, NonFiniteTrainingError
from nandoctor.replaying.script_import import stop_import

LOG = logging.getLogger("nandoctor")
MAX_NBYTES = 8 << 30


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RecorderSettings:
    """What a recorder is told; `Recorder` says what each setting means."""

    model: nn.Module = field(kw_only=False)
    folder: str | os.PathLike[str] = "dumps"
    scaler: Any = None
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None
    builder: Callable[..., nn.Module] | str | None = None
    arguments: Mapping[str, Any] | None = None
    threshold: float = 0.1
    window: int = 100
    in_a_row: int | None = None
    keep: int = 5
    max_nbytes: int = MAX_NBYTES
    keep_optimizer: bool = False
    spike: float | None = None
    on_save: OnSave | None = None
    weights: WeightsSource | None = None
    undo_nbytes: int = UNDO_NBYTES
    method: str = ""
    ambient: Callable[[], AbstractContextManager[Any]] = nullcontext
    from_output: bool = False

    def __post_init__(self) -> None:
        if self.spike is not None and not self.spike > 1:
            raise NanDoctorError(
                f"spike={self.spike} is not above 1.",
                remedy="It is a factor: 10 saves the steps whose loss is over 10 times the median.",
            )
        rule = self.stop_rule
        counts = (rule.window, self.keep, 1 if rule.in_a_row is None else rule.in_a_row)
        if not 0 <= rule.threshold <= 1 or min(counts) < 1:
            raise NanDoctorError(
                f"Recorder does not take threshold={rule.threshold}, window={rule.window}, in_a_row={rule.in_a_row} "
                f"and keep={self.keep}.",
                remedy="threshold is a share from 0 to 1 (1 never stops); window, in_a_row and keep are 1 or more.",
            )

    @property
    def stop_rule(self) -> StopRule:
        """When the training is to be stopped."""
        return StopRule(threshold=self.threshold, window=self.window, in_a_row=self.in_a_row)


RecorderSettings.__init__.__qualname__ = "Recorder"  # what a TypeError about its arguments names


class Recorder(RecorderSettings):
    """Keeps each step of a training until its loss is known to be finite, and writes it to a file where it is not.

    `recorder = Recorder(model, scaler=scaler)`, and in the loop `recorder.watch(loss, batch)` before the backward pass.
    A step then begins with the model's forward in train mode and ends with the next one; `with recorder.step(batch):`
    around the whole step says it outright, and also saves a non-finite step that ends in an exception of the loop.

    The model may be compiled, or wrapped for distribution: give the one that the loop calls. `scaler` is the
    GradScaler, if there is one. `loss` is a function `(output, batch) -> scalar`, or its SPEC, for the replay of the
    backward pass. `arguments` are what the model's class was called with, `builder` the function that was called in its
    stead.

    A file is written at the first non-finite step of an episode, and when training is stopped. `folder` holds the last
    `keep` of this run, none beyond `max_nbytes`, with the optimizer's state if `keep_optimizer` is set. `threshold`,
    `window` and `in_a_row` are those of `StopRule`; a step that the scaler skips counts only where its scale has fallen
    below 1. A step whose loss is finite and over `spike` times the median of the last `window` is saved too, without
    counting towards the end. `on_save(path, event)` is called after each file. Weights beyond `max_nbytes` are left to
    a checkpoint: `weights` is its path, or a function that tells the last one's when a file is written. Up to
    `undo_nbytes` of weights are copied before each update, so that one which spoils them can be saved as well.

    `epoch` and `next_step` may be set: they number what is recorded next.

    For integrations: `method` is the model's method that makes a step, where its forward does not; `ambient` opens the
    autocast that this will run under; with `from_output` the loss is the one in the model's own output.
    """

    def __post_init__(self) -> None:
        stop_import()
        super().__post_init__()
        refuse_flat_weights(self.model)
        self._engine = find_engine(self.model)
        self._observer = Observer(unwrap_model(self._called), self.undo_nbytes)
        self._training, replay_flags = self._describe_training()
        self._handles = ExitStack()
        self._policy = StepPolicy(
            StepHistory(self.stop_rule),
            DumpFolder(Path(self.folder), keep=self.keep, max_nbytes=self.max_nbytes),
            self._make_contents,
            spike=self.spike,
            on_save=self.on_save,
            replay_flags=replay_flags,
        )
        self._tracker = self._make_tracker()
        self._start_step, self._look_at = never_harm(self._tracker.start_step), never_harm(self._tracker.watch)
        self._scouted = False
        self._warned: set[str] = set()
        self._attach()
        atexit.register(self._tracker.on_exception)  # for a script that ends in an error before it closes this
        self._handles.callback(atexit.unregister, self._tracker.on_exception)

    def _describe_training(self) -> tuple[Training, str]:
        """What all files have in common, and the flags that a replay will need; the log says how to do without."""
        model = self._observer.model
        sources = _describe_sources(model, self)
        plan = plan_rebuild(model, sources.model, sources.arguments, built=sources.built, loss=sources.loss)
        for line in plan.advice:
            LOG.warning("%s", line)
        scaler, keep_optimizer = self._find_scaler(), self.keep_optimizer
        return Training(
            observer=self._observer, sources=sources, scaler=scaler, keep_optimizer=keep_optimizer
        ), plan.flags

    def _make_tracker(self) -> StepTracker:
        tracker = StepTracker(
            self._observer,
            self._policy,
            self._training.scaler,
            undo_nbytes=self.undo_nbytes,
            on_stop=self._handles.close,
        )
        tracker.count = None if self._engine is None else self._engine.count
        return tracker

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
        """Counts and results of the run so far."""
        return self._policy.history

    @property
    def written(self) -> tuple[Path, ...]:
        """The files of this run that are still there, the oldest first."""
        return tuple(self._policy.folder.written)

    @property
    def epoch(self) -> int | None:
        """The epoch that is noted of the steps that begin from here on."""
        return self._tracker.epoch

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._tracker.epoch = epoch

    @property
    def next_step(self) -> int:
        """The number of the step that begins next."""
        return self._tracker.next_step

    @next_step.setter
    def next_step(self, number: int) -> None:
        self._tracker.next_step = number

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Recorder]:
        """One step of training, or one micro-batch of it.

        Raises:
            NonFiniteTrainingError: the stop rule holds after this step, or after the one before.
        """
        self.begin(batch)
        with self._on_exception():
            yield self
        self.end()

    def begin(self, batch: Any = None) -> None:
        """Begin a step outright; `end`, or the next `begin`, ends it.

        Raises:
            NonFiniteTrainingError: as `step`.
        """
        self._start_step(never_harm(self._tracker.make_step)(batch, explicit=True))

    def watch(self, loss: torch.Tensor | None = None, batch: Any = None) -> None:
        """Look at this step's loss, or at the model's output where there is no loss; before the backward pass.

        `batch` is what the loss was made from, if `begin` was not told. The answer is not waited for. Under
        torch.distributed all ranks ask each other here, so all must call it.

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
                "recorder.watch was called after a forward in eval mode, which is no step of the training, and looked "
                "at nothing. To record evaluations, put each into `with recorder.step(batch):`."
            )
            return
        step.batch = step.batch if batch is None else batch
        self._look_at(step, self._as_tensor(loss), ask_all=True)

    def _as_tensor(self, loss: Any) -> torch.Tensor | None:
        """The loss; None for what is no number, and a line in the log."""
        if loss is None or is_dense(loss):
            return loss
        try:
            return torch.tensor(float(loss))
        except Exception:  # what an object of the training's raises
            self._warn(
                f"recorder.watch was given a {type(loss).__name__}, which is no loss, and looked at the model's output "
                "instead. Give it the tensor that backward is called on."
            )
            return None

    def _warn(self, message: str) -> None:
        """Log a message once."""
        if message not in self._warned:
            self._warned.add(message)
            LOG.warning("%s", message)

    def save(self, reason: str = "requested") -> Path | None:
        """Save the step under way, whatever its values are: a spike of the loss, an odd batch.

        `reason` stands in the file. The state is that from before the step; after `optimizer.step()`, as far as the
        weights were copied (`undo_nbytes`). Returns the file, None if it could not be written (the log says why).

        Raises:
            NanDoctorError: no step is under way.
        """
        if self._tracker.current is None:
            raise NanDoctorError(
                "There is no step to save: the recorder has seen no forward of its model in train mode.",
                remedy="Call recorder.save between the forward and the next step; in an evaluation, inside "
                "`with recorder.step(batch):`.",
            )
        return self._policy.save(self._tracker.current, reason)

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
        """Look at what has not been looked at yet, and take all hooks off.

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
            self._tracker.on_exception()

    def call_method(self, *args: Any, **kwargs: Any) -> None:
        """Note that the model's `method` is about to be called with these arguments, between `begin` and `watch`."""
        step = self._tracker.current
        assert step is not None, "begin comes first"
        with self.ambient():
            step.before = self._observer.look()
        step.calls.append(pack_call(args, kwargs))

    def _attach(self) -> None:
        tracker = self._tracker
        if self._engine is not None:
            before, after = never_harm(tracker.before_update), never_harm(tracker.after_engine_step)
            self._handles.callback(self._engine.wrap_step(before, after))
        else:
            self._handles.callback(register_optimizer_step_pre_hook(never_harm(tracker.before_step)).remove)
            self._handles.callback(register_optimizer_step_post_hook(never_harm(tracker.after_step)).remove)
        if not self.method:
            attach(self._called, never_harm(self._before_forward), never_harm(self._after_forward), self._handles)
            return
        for name, child in self._observer.model.named_children():
            attach(child, None, never_harm(self._keep_inside(name)), self._handles)

    def _keep_inside(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            step = self._tracker.current
            if step is not None and step.calls and torch.is_grad_enabled():
                step.inside[name] = pack(output, f"output.{name}")

        return keep

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._tracker.before_forward(module, args, kwargs) and not self._scouted:
            self._scout()

    def _scout(self) -> None:
        """Look for autocast within a forward that somebody wrapped (Accelerate does), the first time it runs."""
        model, step = self._observer.model, self._tracker.current
        assert step is not None
        assert step.before is not None
        if step.before.autocast["enabled"] or "forward" not in vars(model):
            return
        self._scouted = True
        children = [module for module in model.modules() if module is not model]
        self._handles.push(scout_autocast(children, self._observer.note_autocast, self._observer.device.type))

    def _after_forward(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        step = self._tracker.after_forward(output)
        if step is None or not self.from_output:
            return
        loss = step.own_loss()
        if loss is None and self._training.sources.loss is None:
            self._warn(
                "The model's output holds no loss, so it is computed outside of the model, and a replay will see no "
                "gradients. Give the recorder a function at the top level of a file: loss=loss_of, with "
                "def loss_of(output, batch): return ..."
            )
        self._look_at(step, loss, ask_all=True)

    @contextmanager
    def _on_exception(self) -> Iterator[None]:
        """If the step raises an error of its own, record it without raising NonFiniteTrainingError."""
        try:
            yield
        except NonFiniteTrainingError:
            raise
        except BaseException:
            self._tracker.on_exception()
            raise

    def _make_contents(self, step: RecordedStep, result: StepResult, event: str) -> Mapping[str, Any]:
        optimizers = self._tracker.optimizers
        contents = describe(self._training, step, result, event, history=self.history, optimizers=optimizers)
        return leave_weights(contents, self.weights, self.max_nbytes)


def _describe_sources(model: nn.Module, settings: RecorderSettings) -> ModelSources:
    """How the model and the loss can be made again; what a partial was given are arguments."""
    builder, arguments = settings.builder, settings.arguments or {}
    if isinstance(builder, functools.partial) and not builder.args:
        arguments = {**builder.keywords, **arguments}
        builder = builder.func
    model_source = describe_source(builder or class_of(model))
    loss_source = None if settings.loss is None else describe_source(settings.loss)
    return ModelSources(
        model=model_source,
        loss=loss_source,
        files=ProjectSources(model, model_source, loss_source),
        arguments=arguments,
        built=builder is not None and not isinstance(builder, type),
        method=settings.method,
    )
