"""The one engine: `FailingStep.run` runs the failing step under a precision policy, and restores what it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from nandoctor.autocast.literals import recast
from nandoctor.autocast.policy import EXACT, Policy, apply_policy, kernels_kept
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.engine import user_code
from nandoctor.engine.call import Batch, Call, Mode, Randomness, in_mode, recorded_backends, seeded, this_run
from nandoctor.engine.interventions import choose_mode, intervene, loss_in_fp32, printed_changes, select_samples
from nandoctor.engine.module_state import (
    copied_state,
    draw_in_fp32,
    find_outside,
    held_by,
    is_large,
    is_new,
    is_spoilt,
    known_tensors,
    nonfinite_kinds,
    restored,
    run_backward,
    widen_tensors,
    with_nonfinite_state,
)
from nandoctor.engine.progress import Listener
from nandoctor.engine.user_code import Project
from nandoctor.errors import LossError, UnsupportedTorchError
from nandoctor.evidence.edits import Change, flatten
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.trace import LOSS, ModuleCall, Place, TensorStats, Trace
from nandoctor.file_memory import kept_in_files
from nandoctor.machine import is_out_of_memory
from nandoctor.process_wide import Shared, collection_paused, held, patched
from nandoctor.torch_compat import CHECKPOINT_APPLY, plain_torch, uncompiled
from nandoctor.tracing.dispatch_hook import (
    Invocation,
    Proceed,
    classes_observed,
    intercepting,
    is_unobserved,
    observer_registered,
)
from nandoctor.tracing.gradient_tracer import GradientTracer
from nandoctor.tracing.module_tracer import Statistics, Tracer
from nandoctor.tracing.op_tracer import OnOp, OpTracer
from nandoctor.tracing.tensor_stats import collect_all, list_unread

Loss = Callable[[Any, Batch], torch.Tensor]
Look = Callable[[Callable[[], Place], Invocation, Proceed], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a run records besides module calls, and the `stage` that progress shows for it.

    `statistics` are read of the tensors that modules take and return. `ops` records every op, and `on_op` gets each
    with its tensors. `backward` runs the backward pass of loss x the step's loss scale, if `worth_backward` accepts
    output and loss; it is recorded if `ops` is set, and `keep` leaves the gradients in the outcome. With `ends_early`
    it ends at the first non-finite gradient. `look` runs each op of forward and loss as a `Handler` does; it is also
    given a function that returns the running module call.
    """

    stage: str = "replay"
    statistics: Statistics = "ranges"
    ops: bool = False
    backward: bool = False
    keep: bool = False
    ends_early: bool = False
    worth_backward: Callable[[Any, torch.Tensor], bool] = lambda *_: True
    on_op: OnOp | None = None
    look: Look | None = None


_STAGES = {"fp32": "in fp32", "fp64": "in fp64", "none": "without autocast"}

MODULES_ONLY = Watch()
CLOSELY = Watch(stage="closer look", statistics="counts", ops=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run: its trace, the output (None if the forward raised), and whether it drew random numbers.

    `gradients` are of the loss itself, by parameter name, if the watch keeps them. `kept` names the state that
    the run left non-finite in the model, True if with more than -Inf; `left` is the state of the model and of torch's
    generators after it, if the watch keeps gradients. `out_of_memory` is True if that ended the run, `refused` if the
    user's code did by `raise` or `assert`.
    """

    trace: Trace
    output: Any
    random: bool
    loss: torch.Tensor | None = None
    gradients: Mapping[str, torch.Tensor] | None = None
    kept: Mapping[str, bool] = field(default_factory=dict)
    left: Mapping[str, torch.Tensor] = field(default_factory=dict)
    out_of_memory: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingStep:
    """A model with the dump's weights, and everything that it takes to run the step that failed.

    `loss`, if any, makes a scalar of output and batch. `recorded` has the modules' own train flags, which hold if the
    mode is the recorded one, and torch's switches. `built` is the state that the model's own code makes non-finite,
    True if with -inf alone. Every run makes `changes` and is told to `progress`. `project` is the model's code.
    """

    model: nn.Module
    call: Call
    loss: Loss | None = None
    mode: Mode
    randomness: Randomness = field(default_factory=Randomness)
    recorded: Recorded = field(default_factory=Recorded)
    built: Mapping[str, bool] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    progress: Listener = field(default_factory=Listener, compare=False)
    project: Project = field(default_factory=Project, compare=False)

    @property
    def low(self) -> FloatFormat:
        """The format that overflow and flushes to zero are judged against, in the reference as well."""
        return self.mode.policy.format

    @property
    def spoilt_buffers(self) -> tuple[str, ...]:
        """The buffers of the model that hold NaN or +Inf, but for those that its own code fills so."""
        buffers = dict(self.model.named_buffers()).keys() - self.built.keys()
        return tuple(
            name for name, kinds in nonfinite_kinds(self.model).items() if name in buffers and is_spoilt(kinds)
        )

    def under(self, policy: Policy) -> FailingStep:
        """Return the step in another precision."""
        return replace(self, mode=replace(self.mode, policy=policy))

    def varied(self, *, training: bool, seed: int | None) -> FailingStep:
        """Return the step in train or eval mode, with this seed."""
        mode = replace(self.mode, training=training)
        return replace(self, mode=mode, randomness=replace(self.randomness, seed=seed))

    @contextmanager
    def kept_ready(self) -> Iterator[None]:
        """Set up once, for all runs within the context, what each of them needs of Python and torch."""
        with observer_registered, self.project.running(), kernels_kept(self.mode.policy, self.mode.device):
            yield

    def run(self, policy: Policy | None = None, watch: Watch = MODULES_ONLY, changes: Sequence[Change] = ()) -> Outcome:
        """Run the forward, the loss if there is one, and the backward pass if `watch` asks for it, and record them.

        Every run starts from the same model, batch and random state, so two runs differ only in `policy` (None: the
        step's own), `watch` and `changes`. The changes are undone afterwards.

        Raises:
            ModelError: the forward raised while everything was still finite, so the call itself is wrong.
            LossError: the loss that the dump names raised.
        """
        step = replace(self if policy is None else self.under(policy), changes=(*self.changes, *changes))
        self.progress.begin(f"{watch.stage} {_STAGES.get(step.mode.policy.label, 'under autocast')}")
        step = replace(step, mode=choose_mode(flatten(step.changes), step.mode))
        with self.project.running(), uncompiled():
            outcome = _run(step, watch)
        self.progress.end(sum(call.leave is not None for call in outcome.trace.calls))
        return outcome


def _run(step: FailingStep, watch: Watch) -> Outcome:
    # If it raises without a graph, try again with one: the forward may take gradients or hook them.
    for grad in (True,) if watch.backward else (False, True):
        outcome, error = _record(step, watch, grad=grad)
        if error is None or (grad and user_code.explains(outcome.trace, error)):
            return outcome
        if user_code.is_wrong_call(error):
            user_code.raise_explained(error, step.mode.policy, step.call.description)
    # Only its ops show a value that one forward both makes and checks. If ops were watched, that may be what raised.
    blinded = f"{type(error).__name__}: {error}" if watch.ops else None
    outcome, error = _record(step, replace(watch, ops=not watch.ops, look=None), grad=True)
    if error is not None and not user_code.explains(outcome.trace, error):
        user_code.raise_explained(error, step.mode.policy, step.call.description)
    return replace(outcome, trace=replace(outcome.trace, blinded=blinded))


def _record(step: FailingStep, watch: Watch, *, grad: bool) -> tuple[Outcome, Exception | None]:
    """Run once, with `grad` in an autograd graph; return the outcome and the exception that ended it, or None."""
    large = is_large(step.model)  # by its own weights, which the run may widen
    with nullcontext() if large else collection_paused:  # a collection walks all of torch
        outcome, error = _record_once(step, watch, grad, large)
    if error is None or not is_unobserved(error):
        return outcome, error
    with classes_observed:
        return _record_once(step, watch, grad, large)


def _record_once(step: FailingStep, watch: Watch, grad: bool, large: bool) -> tuple[Outcome, Exception | None]:
    mode, call = step.mode, select_samples(flatten(step.changes), step.call)
    batch = {name: recast(mode.policy.wider, tensor).clone() for name, tensor in call.batch.items()}
    with in_mode(step.model, mode.training, step.recorded.training):
        with (
            restored(step.model, *held_by(step.loss).values()) as state,
            printed_changes(step.changes, step.model, step.loss),
            seeded(step.randomness, mode.device) as draws,
        ):
            widen_tensors(state.tensors, mode.policy.wider, in_files=large)
            recording = _RecordedRun(replace(step, call=replace(call, batch=batch)), watch, grad=grad, large=large)
            recording.make()
            with plain_torch():
                output = state.kept_apart(recording.output)
            drawn = draws()
        calls = with_nonfinite_state(recording.modules.calls(), recording.modules, step.model)
    error, kinds, kept = recording.raised, recording.kept, dict[str, bool]()
    if kinds:
        with restored(step.model), printed_changes(step.changes, step.model, step.loss):
            before = of_model_and_loss(step, nonfinite_kinds)
        kept = {name: is_spoilt(now) for name, now in kinds.items() if is_new(now, before.get(name))}
    return Outcome(
        trace=recording.trace(calls, kept),
        output=output,
        random=bool(drawn),
        loss=recording.loss,
        gradients=recording.gradients,
        kept=kept,
        left={**recording.left, **({"random numbers": torch.cat(drawn)} if drawn and watch.keep else {})},
        out_of_memory=is_out_of_memory(error),
        refused=error is not None and user_code.is_refusal((isinstance(error, LossError) and error.__cause__) or error),
    ), error


_OF_LOSS = f"{LOSS}."


def of_model_and_loss(step: FailingStep, read: Callable[[Any], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return what is read of the state of a model, and of what its loss holds, after `_OF_LOSS`."""
    found = dict(read(step.model))
    for name, value in held_by(step.loss).items():
        if not (isinstance(value, torch.Tensor) or value is step.model):
            inner = read(value).items()
            found |= {_OF_LOSS + f"{name}.{place}".strip("."): state for place, state in inner}
    return found


class _RecordedRun:
    """One run with its tracers (of ops and the backward pass, if watched) and its results."""

    def __init__(self, step: FailingStep, watch: Watch, *, grad: bool, large: bool) -> None:
        step = replace(step, call=self._with_leaves(step.call))
        known = known_tensors(step.model, step.call.batch) if watch.ops else []
        self._step, self._watch, self._grad, self._large = step, watch, grad, large
        self._edits = flatten(step.changes)
        self._backward = GradientTracer(known) if watch.ops and watch.backward else None
        self._ops = OpTracer(known=known, gradients=self._backward, on_op=watch.on_op) if watch.ops else None
        self.modules = Tracer(step.model, statistics=watch.statistics, on_call=step.progress.on_call, ops=self._ops)
        self.output: Any = None
        self.loss: torch.Tensor | None = None
        self.gradients: Mapping[str, torch.Tensor] | None = None
        self.raised: Exception | None = None
        self._bad_gradients: tuple[TensorStats, ...] = ()
        self._outside: Mapping[str, torch.Tensor] = {}
        self._has_backward = False  # derivatives that the loss takes are no backward pass

    def _with_leaves(self, call: Call) -> Call:
        """Return the call with inputs that require gradients, and note which of them the step itself differentiates by.

        The model gets copies: it may write to an input in place, which it may not to a leaf.
        """
        marked = {name: it for name, it in call.batch.items() if name in call.with_grad | call.differentiated}
        self._leaves = {
            name: it.requires_grad_() for name, it in marked.items() if it.is_floating_point() or it.is_complex()
        }
        found = self._differentiated = set[str]()
        with torch.enable_grad():
            given = {name: leaf.clone() for name, leaf in self._leaves.items()}
        for name, tensor in given.items():
            tensor.register_hook(lambda _, name=name: found.add(name))  # type: ignore[no-untyped-call]
        return replace(call, batch={**call.batch, **given})

    def make(self) -> None:
        """Run the step under the run's policy and edits, and read what it was given, what it made and what it wrote."""
        step, mode, read = self._step, self._step.mode, self.modules.read
        self._taken = read(step.call.taken, counts=True)
        with (
            recorded_backends(step.recorded, mode.device),
            intercepting(draw_in_fp32)
            if mode.policy is EXACT and torch.get_default_dtype() is not torch.float64
            else nullcontext(),
            apply_policy(mode.policy, mode.device),
            intervene(self._edits, step.model, mode.device, self.modules.owner),
        ):
            started = time.perf_counter()
            self._execute()
            self._elapsed_s = time.perf_counter() - started
            self._given, self._losses = read(self.output), read(self.loss, counts=True)
        with plain_torch():
            self._unread = list_unread(self.output)
            self.kept = of_model_and_loss(step, nonfinite_kinds)
            is_kept = self._watch.keep and not self._large
            self.left = of_model_and_loss(step, copied_state) if is_kept else {}

    def trace(self, calls: tuple[ModuleCall, ...], kept: Mapping[str, bool]) -> Trace:
        """Return the trace; `calls` are the module calls, `kept` as in `Outcome`."""
        step, mode = self._step, self._step.mode
        taken, given, losses = collect_all([self._taken, self._given, self._losses])
        end = None if self.raised is None else f"{type(self.raised).__name__}: {self.raised}"
        buffers, weights = (frozenset(dict(it)) for it in (step.model.named_buffers(), step.model.named_parameters()))
        return Trace(
            policy=mode.policy.label,
            format=mode.policy.format,
            training=mode.training,
            seed=step.randomness.seed,
            calls=calls,
            batch=taken,
            output=given,
            loss=losses[0] if losses else None,
            unread=self._unread,
            elapsed_s=self._elapsed_s,
            raised=end,
            ops=self._ops.calls() if self._ops else (),
            buffers=buffers,
            spoilt_buffers=tuple(
                n for n, is_spoilt in kept.items() if is_spoilt and (n in buffers | weights or n.startswith(_OF_LOSS))
            ),
            built=step.built,
            backward=self._backward.calls() if self._backward and self._has_backward else (),
            function_ops=self._backward.ops.calls() if self._backward and self._has_backward else (),
            bad_gradients=self._bad_gradients,
            trained_outside=tuple(name for name in self._outside if name not in self._leaves),
            num_samples=step.call.sample_count,
        )

    def _execute(self) -> None:
        """Run forward and loss under the open policy, and backward outside of autocast, as a training step does."""
        model, mode, watch = self._step.model, self._step.mode, self._watch
        try:
            with user_code.kept_running(), kept_in_files(self._grad and self._large):
                self._run_forward()
            if watch.backward and self.loss is not None and watch.worth_backward(self.output, self.loss):
                # As torch does where a region ends. Up to 2.9, a reentrant checkpoint would compute again with weights
                # that were cast without a graph, and give them no gradients.
                torch.clear_autocast_cache()
                self._has_backward = True
                with user_code.kept_running(), torch.autocast(mode.device.type, enabled=False):
                    outside = find_outside(self.loss, model, {**held_by(self._step.loss), **self._leaves})
                    # Training does not read the gradients by which the step differentiates itself, as by coordinates.
                    unread = (self._leaves.keys() - self._step.call.with_grad) | self._differentiated
                    self._outside = {name: leaf for name, leaf in outside.items() if name not in unread}
                    self._bad_gradients, self.gradients = run_backward(
                        {**dict(model.named_parameters()), **self._outside},
                        self.loss,
                        loss_scale=mode.loss_factor,
                        keep=watch.keep,
                        ends_early=watch.ends_early,
                        large=self._large,
                    )
        except UnsupportedTorchError:  # of nandoctor's own, though raised inside the user's code
            raise
        except Exception as error:
            self.raised = error
        finally:
            if self._backward is not None:
                self._backward.close()

    def _run_forward(self) -> None:
        """Compute output and loss; if the loss raises, the output stays."""
        step, call, ops, look, device = self._step, self._step.call, self._ops, self._watch.look, self._step.mode.device
        with (
            self.modules,
            ops.watching(self.modules.owner) if ops is not None else nullcontext(),
            intercepting(partial(look, self.modules.owner)) if look is not None else nullcontext(),
            open_checkpoints() if self._backward is not None else nullcontext(),
            torch.set_grad_enabled(self._grad),
        ):
            self.output = call.forward(call.batch)
            if step.loss is not None:
                if ops is not None:
                    ops.phase = "loss"
                with loss_in_fp32(self._edits, device) as widen:
                    self.loss = user_code.compute_loss(step.loss, widen(self.output), call.batch, device=device)


@contextmanager
def open_checkpoints() -> Iterator[None]:
    """Run this thread's reentrant checkpoints as plain calls while the context is open.

    Their backward recomputes the block in a graph of its own, and would show all of it as one CheckpointFunction.
    A block without an input that needs a gradient is left alone: the checkpoint gives it none.
    """
    with held((this_run, "opens_checkpoints", True)), _checkpoint_patch:
        yield


def _apply_opened(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        needs_gradient = any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
        if needs_gradient and this_run.opens_checkpoints:
            return function(*args)
        return checkpoint(function, preserve_rng_state, *args)

    return apply


_checkpoint_patch = Shared(lambda: patched([(CHECKPOINT_APPLY, _apply_opened)]))
