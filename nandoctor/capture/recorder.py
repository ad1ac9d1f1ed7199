"""`Recorder`: watches a training loop for non-finite steps, saves them whole, and stops the run when it must.

In: a model, and the loss of each step. Out: dumps, warnings in the log, and `NonFiniteTrainingError`.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nandoctor.capture.archive import Archive
from nandoctor.capture.async_flags import Flag, agree, raise_flag
from nandoctor.capture.dump_contents import Origins, describe, describe_optimizers, describe_scaler
from nandoctor.capture.history import History, StepResult, StopRule
from nandoctor.capture.hooks import attach, scout_autocast
from nandoctor.capture.source_info import describe_source, unwrap
from nandoctor.capture.step import Moment, Observer, pack_call
from nandoctor.capture.step_policy import Judge
from nandoctor.dumps.trees import pack
from nandoctor.errors import NanDoctorError, NonFiniteTrainingError
from nandoctor.replaying.script_import import stop_import

LOG = logging.getLogger("nandoctor")
MAX_NBYTES = 8 << 30
_MAX_CALLS = 16
"""Forwards in train mode that nobody watches are no step: of these no more are kept."""


class Recorder:
    """Keeps each step of a training until its loss is known to be finite, and writes it to a file where it is not.

    `recorder = Recorder(model, scaler=scaler)`, and in the loop `recorder.watch(loss, batch)` before the backward pass.
    A step then begins with the model's forward in train mode and ends with the next one; `with recorder.step(batch):`
    around the whole step says it outright, and also saves a bad step that ends in an exception of the loop's own.

    The model may be compiled, or wrapped for distribution: give the one that the loop calls. `scaler` is the
    GradScaler, if there is one. `loss` is a function `(output, batch) -> scalar`, or its SPEC, for the replay of the
    backward pass. `arguments` are what the model's class was called with, `builder` the function that was called in its
    stead.

    A file is written at the first bad step of an episode, and when training is stopped. `folder` holds the last `keep`
    of this run, none beyond `max_nbytes`, with the optimizer's state if `keep_optimizer` is set. `threshold`, `window`
    and `in_a_row` are those of `StopRule`; a step that the scaler skips counts only where its scale has fallen below 1.

    `epoch` and `next_step` may be set: they number what is recorded next.

    For integrations: `method` is the model's method that makes a step, where its forward does not; `ambient` opens the
    autocast that this will run under; with `from_output` the loss is the one in the model's own output.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        folder: str | os.PathLike[str] = "dumps",
        scaler: Any = None,
        loss: Callable[[Any, Any], torch.Tensor] | str | None = None,
        builder: Callable[..., nn.Module] | str | None = None,
        arguments: Mapping[str, Any] | None = None,
        threshold: float = 0.1,
        window: int = 100,
        in_a_row: int | None = None,
        keep: int = 5,
        max_nbytes: int = MAX_NBYTES,
        keep_optimizer: bool = False,
        method: str = "",
        ambient: Callable[[], AbstractContextManager[Any]] = nullcontext,
        from_output: bool = False,
    ) -> None:
        stop_import()
        rule = StopRule(threshold=threshold, window=window, in_a_row=in_a_row)
        _check(rule, keep)
        archive = Archive(Path(folder), keep=keep, max_nbytes=max_nbytes)
        self.epoch: int | None = None
        self._judge = Judge(History(rule), archive, self._make_contents)
        self._scaler, self._ambient, self._from_output = scaler, ambient, from_output
        self._keep_optimizer = keep_optimizer
        self._observer = Observer(unwrap(model))
        self._origins = Origins(
            model=describe_source(builder or type(self._observer.model)),
            loss=None if loss is None else describe_source(loss),
            arguments=arguments or {},
            built=builder is not None,
            method=method,
        )
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._optimizers: dict[int, Optimizer | None] = {}
        self._current: Moment | None = None
        self._pending: list[Moment] = []
        self.next_step = 0
        self._scouted = False
        self._handles = ExitStack()
        self._attach(model, method)
        atexit.register(self._settle_quietly)  # for a script that ends in an error before it closes this
        self._handles.callback(atexit.unregister, self._settle_quietly)

    @property
    def history(self) -> History:
        """What the run has come to so far."""
        return self._judge.history

    @property
    def written(self) -> tuple[Path, ...]:
        """The files of this run that are still there, the oldest first."""
        return tuple(self._judge.archive.written)

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Recorder]:
        """One step of training, or one micro-batch of it.

        Raises:
            NonFiniteTrainingError: this step, or the one before, is one too many.
        """
        self.begin(batch)
        with self._last_words():
            yield self
        self.end()

    def begin(self, batch: Any = None) -> None:
        """Begin a step outright; `end`, or the next `begin`, ends it.

        Raises:
            NonFiniteTrainingError: as `step`.
        """
        self._turn_to(self._make_moment(batch, explicit=True))

    def watch(self, loss: torch.Tensor | None = None, batch: Any = None) -> None:
        """Look at this step's loss, or at the model's output where there is no loss; before the backward pass.

        `batch` is what the loss was made from, if `begin` was not told. The answer is not waited for. Under
        torch.distributed all ranks ask each other here, so all must call it.

        Raises:
            NanDoctorError: no forward was seen since the last step.
        """
        if self._current is None:
            raise NanDoctorError(
                "The recorder has seen no forward of its model in train mode since the last step.",
                remedy="Call recorder.watch after the forward, and give Recorder the very model that the loop calls; "
                "or put the step into `with recorder.step(batch):`.",
            )
        self._current.batch = self._current.batch if batch is None else batch
        self._look_after(self._current, loss, ask_all=True)

    def end(self) -> None:
        """End the step that `begin` began.

        Raises:
            NonFiniteTrainingError: as `step`.
        """
        if self._current is not None and not self._current.flags and self._current.returned:
            self.watch()
        self._turn_to(None)

    def close(self) -> None:
        """Look at what has not been looked at yet, and take all hooks off.

        Raises:
            NonFiniteTrainingError: as `step`.
        """
        with self._handles:
            self._turn_to(None, final=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
            return
        with self._handles:
            self._settle_quietly()

    def call_method(self, *args: Any, **kwargs: Any) -> None:
        """Note that the model's `method` is about to be called with these arguments, between `begin` and `watch`."""
        assert self._current is not None, "begin comes first"
        with self._ambient():
            self._current.before = self._observer.look()
        self._current.calls.append(pack_call(args, kwargs))

    def _attach(self, model: nn.Module, method: str) -> None:
        self._handles.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        if not method:
            attach(model, self._before_forward, self._after_forward, self._handles)
            return
        for name, child in self._observer.model.named_children():
            attach(child, None, self._keep_inside(name), self._handles)

    def _keep_inside(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._current is not None and self._current.calls and torch.is_grad_enabled():
                self._current.inside[name] = pack(output, f"output.{name}")

        return keep

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        moment = self._current
        explicit = moment is not None and moment.explicit
        if not torch.is_grad_enabled() or not (module.training or explicit):
            return
        if moment is None or (not explicit and (moment.flags or moment.passed or len(moment.calls) >= _MAX_CALLS)):
            moment = self._make_moment(None, explicit=False)
            self._turn_to(moment)
        if moment.before is None:
            moment.before = self._observer.look()
            self._scout(moment.before.autocast)
        else:
            moment.between.append(self._observer.look_between())
        moment.calls.append(pack_call(args, kwargs))
        moment.num_running += 1

    def _scout(self, autocast: Mapping[str, Any]) -> None:
        """Look for autocast within a forward that somebody wrapped (Accelerate does), the first time it runs."""
        model = self._observer.model
        if self._scouted or autocast["enabled"] or "forward" not in vars(model):
            return
        self._scouted = True
        children = [module for module in model.modules() if module is not model]
        self._handles.push(scout_autocast(children, self._observer.note_autocast, self._observer.device.type))

    def _after_forward(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        moment = self._current
        if moment is None or not moment.num_running:
            return
        moment.num_running -= 1
        moment.returned.append(pack(output, "output"))
        if self._from_output:
            self._look_after(moment, moment.own_loss(), ask_all=True)

    def _look_after(self, moment: Moment, loss: torch.Tensor | None, *, ask_all: bool) -> None:
        """Raise this step's flag, and see what the forward did to the buffers."""
        moment.loss = moment.loss if loss is None else loss.detach()
        flag = raise_flag(moment.outputs() if loss is None else [loss])
        if flag is None:
            flag = torch.zeros((), dtype=torch.bool, device=self._observer.device)
        moment.flags.append(Flag(agree(flag, ask_all=ask_all)))
        if moment.before is not None:
            self._observer.learn(moment.before)

    def _make_moment(self, batch: Any, *, explicit: bool) -> Moment:
        step = self.next_step
        self.next_step += 1
        scale, version = _read_scale(self._scaler)
        return Moment(step=step, epoch=self.epoch, explicit=explicit, batch=batch, scale=scale, scale_version=version)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Read the flags before an optimizer spoils the weights that the dump needs.

        A plain optimizer gets here when its scaler has waited for the gradients already, and not at all where it skips.
        A fused one gets here always, with the scaler's own flag, and leaves the weights alone by itself.
        """
        moment = self._current
        if moment is None:
            return
        if not self._owns(optimizer):
            moment.passed = True
            return
        if not moment.flags and moment.returned:
            self.watch()
        found = getattr(optimizer, "found_inf", None)
        moment.skip = Flag(found) if isinstance(found, torch.Tensor) else None
        if not moment.waits_for_skip:
            self._settle()
            if moment.loss_bad or moment.was_skipped:
                self._decide(moment)
        moment.stepped = True
        for waiting in (*self._pending, moment):
            waiting.num_updates += 1

    def _owns(self, optimizer: Optimizer) -> bool:
        key = id(optimizer)
        if key not in self._optimizers:
            trained = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            self._optimizers[key] = optimizer if any(parameter in self._parameters for parameter in trained) else None
        return self._optimizers[key] is not None

    def _turn_to(self, following: Moment | None, *, final: bool = False) -> None:
        """End the current step and begin the next; then see to those that can be judged."""
        moment, self._current = self._current, following
        if moment is not None and moment.flags:
            scale, version = _read_scale(self._scaler)
            if version != moment.scale_version and not moment.stepped:
                # The scaler was updated and no optimizer was called: the scaler has waited for the gradients by now.
                moment.skipped = scale is not None and moment.scale is not None and bool(scale < moment.scale)
            self._pending.append(moment)
        self._settle(final=final)

    def _settle(self, *, final: bool = False, may_stop: bool = True) -> None:
        """Judge what has been waiting, except for a last step of which the device has yet to say if it was skipped."""
        while self._pending:
            moment = self._pending[0]
            is_last = len(self._pending) == 1
            if is_last and not final and moment.waits_for_skip and not moment.loss_bad:
                return
            if not moment.judged:
                self._decide(moment, may_stop=may_stop)
            del self._pending[0]

    def _decide(self, moment: Moment, *, may_stop: bool = True) -> None:
        try:
            self._judge.judge(moment, may_stop=may_stop)
        except NonFiniteTrainingError:
            self._pending.clear()
            self._current = None
            self._handles.close()
            raise

    @contextmanager
    def _last_words(self) -> Iterator[None]:
        """A step that ends in an error of its own is judged for once without an error of ours."""
        try:
            yield
        except NonFiniteTrainingError:
            raise
        except BaseException:
            self._settle_quietly()
            raise

    def _settle_quietly(self) -> None:
        moment, self._current = self._current, None
        try:
            if moment is not None and not moment.flags and moment.returned:
                self._look_after(moment, None, ask_all=False)  # the other ranks are not here to answer
            self._pending += [moment] if moment is not None and moment.flags else []
            self._settle(final=True, may_stop=False)
        except Exception as error:
            LOG.warning("nandoctor could not look at the last step (%s: %s).", type(error).__name__, error)

    def _make_contents(self, moment: Moment, result: StepResult, event: str) -> Mapping[str, Any]:
        contents = describe(moment, result, event, self._observer, self._origins, self.history)
        owned = [optimizer for optimizer in self._optimizers.values() if optimizer is not None]
        optimizer = describe_optimizers(owned) if self._keep_optimizer else None
        return {**contents, "scaler": describe_scaler(self._scaler, moment), "optimizer": optimizer}


def _read_scale(scaler: Any) -> tuple[torch.Tensor | None, int | None]:
    """The loss scale on its device and how often it was updated; a scaler that has scaled nothing has its first one."""
    scale = getattr(scaler, "_scale", None)
    if isinstance(scale, torch.Tensor):
        return scale.detach().clone(), scale._version
    first = getattr(scaler, "_init_scale", None)
    return (None, None) if first is None else (torch.tensor(float(first)), 0)


def _check(rule: StopRule, keep: int) -> None:
    if not 0 <= rule.threshold <= 1 or rule.window < 1 or (rule.in_a_row is not None and rule.in_a_row < 1) or keep < 1:
        raise NanDoctorError(
            f"There is no stopping by threshold={rule.threshold}, window={rule.window}, in_a_row={rule.in_a_row} and "
            f"keep={keep}.",
            remedy="threshold is a share from 0 to 1 (1 never stops); window, in_a_row and keep are 1 or more.",
        )
