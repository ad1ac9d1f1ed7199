"""The one expensive function: `run` a prepared model on its batch under a precision policy.

In: a `Setup` and a `Policy`. Out: an `Outcome`: the `Trace` and the model's output; everything touched is put back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from nandoctor.autocast.policy import EXACT, Policy, apply_policy
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.edits import Edit, SingleEdit
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.trace import ModuleCall, TensorStats, Trace
from nandoctor.replaying import interventions
from nandoctor.replaying.model_loading import place_of
from nandoctor.replaying.recorded_step import (
    from_saved_states,
    recorded_backends,
    restore_generators,
    restore_host_generators,
)
from nandoctor.tracing.gradient_tracer import GradientTracer, bad_gradients, open_checkpoints
from nandoctor.tracing.module_tracer import Tracer
from nandoctor.tracing.op_tracer import Kind, OnOp, OpTracer
from nandoctor.tracing.tensor_stats import collect, is_finite, measure

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[Any, Batch], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model with the dump's weights, and the calls that reproduce the failing step.

    `batch` holds every array that may be needed, on the model's device; `forward` takes it and returns the model's
    output, reading the arrays in `used`. `loss`, where there is one, makes a scalar of output and batch.
    `description` shows the call. `rng_states` are the generators' states before the forward, where the dump has them.
    `recorded` is what else a recorder's file says: train flags, numpy's and Python's generators, torch's switches.
    """

    model: nn.Module
    batch: Batch
    used: frozenset[str]
    forward: Callable[[Batch], Any]
    loss: Loss | None = None
    device: torch.device
    description: str
    rng_states: tuple[torch.Tensor, ...] = ()
    recorded: Recorded | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What to record beside every module call.

    `counts` counts exactly whatever asks for it, `per_sample` every tensor, with its samples and exponents. `ops`
    records every operation. `backward` runs the backward pass of loss x `loss_scale`, recorded op by op with `ops`;
    `keep`
    leaves the gradients themselves in the outcome. Without `measures` nothing is read of the module calls, which is
    quicker in a model of many small ones.
    """

    measures: bool = True
    counts: bool = False
    per_sample: bool = False
    ops: bool = False
    backward: bool = False
    loss_scale: float = 1.0
    keep: bool = False


MODULES_ONLY = Watch()
CLOSELY = Watch(counts=True, ops=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run leaves: its trace, the output (None if the forward raised), and whether it drew random numbers.

    `gradients`, by the names of the parameters and at loss scale 1, are there where the watch keeps them.
    """

    trace: Trace
    output: Any
    random: bool
    loss: torch.Tensor | None = None
    gradients: Mapping[str, torch.Tensor] | None = None


@dataclass(slots=True, kw_only=True)
class _Result:
    """What the forward, the loss and the backward pass left behind."""

    output: Any = None
    loss: torch.Tensor | None = None
    bad_gradients: tuple[TensorStats, ...] = ()
    gradients: Mapping[str, torch.Tensor] | None = None
    raised: Exception | None = None
    elapsed_s: float = 0.0


class _Observers:
    """The tracers of one run, made for one batch."""

    def __init__(
        self,
        setup: Setup,
        batch: Batch,
        watch: Watch,
        low: FloatFormat,
        on_call: Callable[[int], None] | None,
        on_op: OnOp | None,
    ) -> None:
        known = _known_tensors(setup.model, batch)
        self.gradients = GradientTracer(low=low) if watch.backward and watch.ops else None
        self.ops = OpTracer(known=known, low=low, gradients=self.gradients, on_op=on_op) if watch.ops else None
        self.modules = Tracer(
            setup.model,
            counts_for=low,
            examine=watch.counts,
            per_sample=watch.per_sample,
            measures=watch.measures,
            on_call=on_call,
            producer_of=self.ops.producer_of if self.ops else None,
        )

    @contextmanager
    def watching_forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.modules)
            if self.ops is not None:
                stack.enter_context(self.ops.watching(self.modules.owner))
            if self.gradients is not None:
                stack.enter_context(open_checkpoints())
            yield

    def begin_loss(self) -> None:
        if self.ops is not None:
            self.ops.phase = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The failing step as it was replayed: what `run` needs to run it again."""

    setup: Setup
    policy: Policy
    training: bool
    seed: int | None
    loss_scale: float = 1.0

    def run(self, watch: Watch, *, on_op: OnOp | None = None) -> Outcome:
        """The step again, with something to watch."""
        low = self.policy.format
        return run(self.setup, self.policy, training=self.training, seed=self.seed, low=low, watch=watch, on_op=on_op)


def run(
    setup: Setup,
    policy: Policy,
    *,
    training: bool,
    seed: int | None,
    low: FloatFormat,
    watch: Watch = MODULES_ONLY,
    edits: Sequence[Edit] = (),
    on_call: Callable[[int], None] | None = None,
    on_op: OnOp | None = None,
) -> Outcome:
    """Run the forward, the loss where there is one, and the backward pass where it is asked for, and record them.

    Every run starts from the same buffers, batch and random state, so that two runs differ in the policy alone. A
    `seed` of None means the saved random state; where `training` is the recorded flag of the model, its modules have
    theirs. Overflow and flushes to zero are judged against `low`. `edits` are made to the run, and undone after it.
    `on_call` is told how many module calls have returned, `on_op` each op with its tensors.

    Raises:
        ModelError: the forward raised while everything was still finite, so the call itself is wrong.
        LossError: the loss that the dump names did.
    """
    singles = interventions.flatten(edits)
    policy = interventions.choose_policy(singles, policy)
    watch = replace(watch, loss_scale=interventions.choose_loss_scale(singles, watch.loss_scale))
    for grad in sorted({watch.backward, True}):  # once more with a graph, for what takes gradients or hooks them
        outcome, error = _record(setup, policy, training, seed, low, watch, singles, on_call, on_op, grad=grad)
        if error is None or _shows_damage(outcome.trace):
            break
    if error is not None and not _shows_damage(outcome.trace):
        # What is made and checked in one forward shows in its ops alone; and tensors that dispatch their own ops
        # (jagged nested ones) cannot be watched op by op.
        other = replace(watch, ops=not watch.ops)
        blinded = f"{type(error).__name__}: {error}" if watch.ops else None
        outcome, error = _record(setup, policy, training, seed, low, other, singles, on_call, on_op, grad=grad)
        outcome = replace(outcome, trace=replace(outcome.trace, blinded=blinded))
    if error is not None and not _shows_damage(outcome.trace):
        raise error if isinstance(error, LossError) else _explain_forward_error(error) from error
    return outcome


def _record(
    setup: Setup,
    policy: Policy,
    training: bool,
    seed: int | None,
    low: FloatFormat,
    watch: Watch,
    edits: tuple[SingleEdit, ...],
    on_call: Callable[[int], None] | None,
    on_op: OnOp | None,
    *,
    grad: bool,
) -> tuple[Outcome, Exception | None]:
    """One run, with an autograd graph where `grad` says so, and the exception that ended it."""
    chosen = interventions.select_samples(edits, setup.batch, setup.used)
    batch = {name: _in_own_format(tensor, policy).clone() for name, tensor in chosen.items()}
    with _in_mode(setup, training):
        with ExitStack() as stack:
            stack.enter_context(_restored(setup.model))
            if policy is EXACT:
                state = [*setup.model.parameters(), *setup.model.buffers()]
                floating = [tensor for tensor in state if tensor.is_floating_point()]
                stack.enter_context(interventions.state_in(floating, torch.float64))
            draws = stack.enter_context(_seeded(seed, setup))
            observers = _Observers(setup, batch, watch, low, on_call, on_op)
            inputs = observers.modules.read({name: batch[name] for name in batch if name in setup.used}, counts=True)
            stack.enter_context(recorded_backends(setup.recorded, setup.device))
            stack.enter_context(apply_policy(policy, setup.device))
            stack.enter_context(interventions.intervene(edits, setup.model, setup.device, observers.modules.owner))
            result = _execute(setup, batch, observers, watch, edits, grad=grad)
            output, loss = observers.modules.read(result.output), observers.modules.read(result.loss, counts=True)
            drew_random = draws()
        calls = _with_bad_state(observers.modules.calls(), setup.model, low)
    ops = observers.ops.calls() if observers.ops else ()
    trace = Trace(
        policy=policy.name,
        format=policy.format,
        training=training,
        seed=seed,
        calls=calls,
        batch=collect(inputs),
        output=collect(output),
        elapsed_s=result.elapsed_s,
        raised=None if result.raised is None else f"{type(result.raised).__name__}: {result.raised}",
        ops=ops,
        buffers=frozenset(name for name, _ in setup.model.named_buffers()),
        loss=collect(loss)[0] if loss else None,
        backward=observers.gradients.calls(ops) if observers.gradients else (),
        bad_gradients=result.bad_gradients,
    )
    outcome = Outcome(
        trace=trace, output=result.output, random=drew_random, loss=result.loss, gradients=result.gradients
    )
    return outcome, result.raised


def _in_own_format(tensor: torch.Tensor, policy: Policy) -> torch.Tensor:
    return tensor.double() if policy is EXACT and tensor.is_floating_point() else tensor


def _execute(
    setup: Setup, batch: Batch, observers: _Observers, watch: Watch, edits: tuple[SingleEdit, ...], *, grad: bool
) -> _Result:
    """Forward and loss under the policy that is open, backward outside of autocast, as a training step has them."""
    result = _Result()
    started = time.perf_counter()
    try:
        with observers.watching_forward(), torch.set_grad_enabled(grad):
            result.output = setup.forward(batch)
            if setup.loss is not None:
                observers.begin_loss()
                with interventions.loss_in_fp32(edits, setup.device) as widen:
                    result.loss = _compute_loss(setup.loss, widen(result.output), batch, setup.device)
        if watch.backward and result.loss is not None:
            with torch.autocast(setup.device.type, enabled=False):
                result.bad_gradients, result.gradients = _backward(setup.model, result.loss, watch)
    except Exception as error:
        result.raised = error
    finally:
        if observers.gradients is not None:
            observers.gradients.close()
    result.elapsed_s = time.perf_counter() - started
    return result


def _compute_loss(loss: Loss, output: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """The loss under autocast, or outside of it where it uses what CUDA's autocast refuses, as training must have."""
    try:
        return loss(output, batch)
    except RuntimeError as error:
        if "unsafe to autocast" not in str(error):
            raise
    with torch.autocast(device.type, enabled=False):
        return loss(output, batch)


def _backward(
    model: nn.Module, loss: torch.Tensor, watch: Watch
) -> tuple[tuple[TensorStats, ...], Mapping[str, torch.Tensor] | None]:
    """Run the backward pass; the parameters' non-finite gradients, and all of them where they are to be kept.

    None are left on the model.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        (loss * watch.loss_scale).backward()  # type: ignore[no-untyped-call]
        if not watch.keep:
            return bad_gradients(model), None
        made = [(name, parameter.grad) for name, parameter in model.named_parameters()]
        unscaled = {name: gradient / watch.loss_scale for name, gradient in made if gradient is not None}
        return bad_gradients(model), unscaled
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _known_tensors(model: nn.Module, batch: Batch) -> Iterator[tuple[Kind, str, torch.Tensor]]:
    """What the ops meet from outside."""
    idle = (module for module in model.modules() if _writes_only(module))
    unread = {id(buffer) for module in idle for buffer in module.buffers(recurse=False)}
    yield from (("weight", name, tensor) for name, tensor in model.named_parameters() if not is_lazy(tensor))
    for name, tensor in model.named_buffers():
        if not is_lazy(tensor):
            yield "unread" if id(tensor) in unread else "buffer", name, tensor
    yield from (("batch", name, tensor) for name, tensor in batch.items())


def _shows_damage(trace: Trace) -> bool:
    """Whether anything went non-finite before the forward raised; a -inf that an op was asked for is a mask."""
    calls = (stats for call in trace.calls for stats in (*call.inputs, *call.outputs))
    if not all(stats.finite for stats in (*trace.batch, *calls)):
        return True
    analyses = [op.analysis for op in trace.ops if op.analysis is not None]
    return any(analysis.num_exact_finite > 0 or analysis.kinds != ("-inf",) for analysis in analyses)


def _explain_forward_error(error: Exception) -> ModelError:
    return ModelError(
        f"The model's forward raised {type(error).__name__}{place_of(error)}: {error}",
        remedy="Check what the model is called with: `nandoctor inspect` lists the saved arrays, --inputs picks among "
        "them by name, and --call names a function (model, batch) -> output for anything else.",
    )


@contextmanager
def _in_mode(setup: Setup, training: bool) -> Iterator[None]:
    flags = [(module, module.training) for module in setup.model.modules()]
    recorded = setup.recorded.training if setup.recorded is not None else {}
    try:
        setup.model.train(training)
        if recorded.get("") is training:
            for name, module in setup.model.named_modules():
                module.training = recorded.get(name, training)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Puts back what a forward changes: buffers, written in place or replaced, and attributes that it set."""
    # A ScriptModule keeps its attributes in C++, where its graph can write to them but not replace them.
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    registries = [(registry, dict(registry)) for module in plain for registry in (vars(module), module._buffers)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for registry, saved in registries:
            registry.clear()
            registry.update(saved)
        with torch.no_grad():
            for buffer, saved_buffer in buffers:
                buffer.copy_(saved_buffer)


@contextmanager
def _seeded(seed: int | None, setup: Setup) -> Iterator[Callable[[], bool]]:
    """Seeds torch, numpy and Python, and restores all three; what it yields tells whether torch's were drawn."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    device = setup.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"):
        random.seed(seed or 0)
        np.random.seed(seed or 0)
        torch.manual_seed(seed or 0)
        if seed is None:
            restore_generators(setup.rng_states, device)
            if setup.recorded is not None:
                restore_host_generators(setup.recorded)
        before = _generator_states(device)
        try:
            with from_saved_states() if seed is None else nullcontext():
                yield lambda: any(not torch.equal(a, b) for a, b in zip(before, _generator_states(device), strict=True))
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _with_bad_state(calls: tuple[ModuleCall, ...], model: nn.Module, low: FloatFormat) -> tuple[ModuleCall, ...]:
    """The calls, each with its module's bad state: that reads every weight, so only where something is bad."""
    if all(stats.finite for call in calls for stats in (*call.inputs, *call.outputs)):
        return calls
    state = _bad_state(model, low)
    return tuple(replace(call, state=state.get(call.module, ())) for call in calls)


def _bad_state(model: nn.Module, low: FloatFormat) -> dict[str, tuple[TensorStats, ...]]:
    """Per module path, its own non-finite weights and the non-finite buffers that a forward would read."""
    bad: dict[str, tuple[TensorStats, ...]] = {}
    for path, module in model.named_modules():
        own = (*module.named_parameters(recurse=False), *_read_buffers(module))
        readings = [(name, measure(tensor, counts_for=low)) for name, tensor in own if not is_finite(measure(tensor))]
        if readings:
            bad[path] = collect([(name, reading) for name, reading in readings if reading is not None])
    return bad


def _writes_only(module: nn.Module) -> bool:
    """Whether this is a norm layer in train mode, which writes its running statistics and does not read them."""
    return isinstance(module, _NormBase) and module.training


def _read_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(()) if _writes_only(module) else module.named_buffers(recurse=False)
