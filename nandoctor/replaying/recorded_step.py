"""Run a step as the recorder saw it: with the same calls, modes, generator states and torch switches."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from nandoctor.dumps.classify import unwrapped_name
from nandoctor.dumps.packing import fill
from nandoctor.dumps.recorded_format import Call, RandomStates, Recorded
from nandoctor.dumps.trees import slots
from nandoctor.errors import ModelError
from nandoctor.process_wide import generators_kept, held, is_forked
from nandoctor.replaying.input_binding import Binding, spell
from nandoctor.torch_compat import unobserved
from nandoctor.torch_switches import RECORDED, switched
from nandoctor.tracing.tensor_tree import walk_tensors

Tensors = Mapping[str, torch.Tensor]

_with_grad: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
"""For each saved input that required a gradient, the tensor that the last call got for it."""

_from_saved_states: ContextVar[bool] = ContextVar("from_saved_states", default=False)
"""True in a run where each call starts from its generator states in the dump."""


def bind_calls(recorded: Recorded, device: torch.device, missing: Sequence[str] = ()) -> Binding:
    """Bind the training's calls to their recorded arguments; several calls give the list of their outputs.

    Raises:
        ModelError: no tensor that the model was called with is in the file, and `missing` says why.
    """
    names = [name for call in recorded.calls for name in slots([call.args, call.kwargs])]
    lost = [text for text in missing if text.startswith("input.")]
    if lost and not names:
        raise ModelError(
            f"What the model was called with is not in the file: {lost[0]}.",
            remedy="Name saved arrays in its place, in the order of forward's parameters, with --inputs (`nandoctor "
            "inspect` lists them), or give --call file.py:function, a (model, batch) -> output.",
        )

    def forward(model: nn.Module, tensors: Mapping[str, Any]) -> Any:
        with _watching(model, recorded) as inside:
            returned = [_call(model, recorded.method, call, tensors, device) for call in recorded.calls]
        output = returned[0] if len(returned) == 1 else returned
        if not recorded.method:
            return output
        return {"returned": output.get("loss") if isinstance(output, Mapping) else output, **inside}

    what = f"model.{recorded.method}" if recorded.method else "model"
    shown = ", ".join(dict.fromkeys(spell(name.partition(".")[2]) for name in names))
    times = f", {len(recorded.calls)} calls" if len(recorded.calls) > 1 else ""
    return Binding(description=f"{what}({shown}){times}", arrays=tuple(dict.fromkeys(names)), forward=forward)


def _call(model: nn.Module, method: str, call: Call, tensors: Tensors, device: torch.device) -> Any:
    if call.rng is not None and _from_saved_states.get():
        restore_generators(call.rng.torch_states, device)
        restore_host_generators(call.rng)
    for name in call.with_grad:
        _with_grad[tensors[name]] = _require_grad(tensors[name])
    tensors = _as_passed(tensors)
    return _entry_point(model, method)(*fill(call.args, tensors, device), **fill(call.kwargs, tensors, device))


def _as_passed(tensors: Tensors) -> Tensors:
    """Return the tensors as passed to the model, so that a loss can ask for gradients of those in its batch."""
    return {name: _with_grad.get(tensor, tensor) for name, tensor in tensors.items()} if _with_grad else tensors


def _require_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that requires grad, as if from an upstream model; reentrant checkpointing needs such an input."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor
    with unobserved():
        return tensor.detach().requires_grad_().clone()  # not a leaf: a model may write to its input in place


def restore_generators(states: Iterable[torch.Tensor], device: torch.device) -> None:
    """Restore each saved state to the generator that it fits by size: the CPU's has thousands of bytes, CUDA's 16."""
    for state in states:
        if state.numel() == torch.get_rng_state().numel():
            torch.set_rng_state(state)
        elif device.type == "cuda" and state.numel() == torch.cuda.get_rng_state(device).numel():
            torch.cuda.set_rng_state(state, device)


def make_batch(recorded: Recorded, tensors: Tensors, device: torch.device) -> Any:
    """Return the training loop's batch or, if none was recorded, the arguments of the calls by name."""
    if recorded.batch is not None:
        return fill(recorded.batch, _as_passed(tensors), device)
    return {name.rpartition(".")[2]: tensors[name] for name in bind_calls(recorded, device).arrays}


def own_loss(place: str) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss function that reads the loss at `place` in the model's output; without one, the whole output."""

    def loss(output: Any, _: Any) -> torch.Tensor:
        found = dict(walk_tensors(output))
        value = found[place if place in found else ""]
        return value if value.dim() == 0 else value.mean()

    return loss


def recorded_backends(recorded: Recorded, device: torch.device) -> AbstractContextManager[None]:
    """Return a context with the recorded switches, if they were set for the kind of device that the replay is on."""
    on_device = recorded.autocast is not None and recorded.autocast.device == device.type
    values = recorded.backends if on_device else {}
    return switched({name: values[name] for name in RECORDED if name in values and _is_possible(name, values[name])})


def _is_possible(name: str, value: Any) -> bool:
    """Return True if a switch can have this value; torch's warnings about others would quote the file."""
    if name == "num_threads":  # a forked process has none of its parent's threads
        return type(value) is int and 0 < value <= (1 if is_forked() else os.cpu_count() or 1)
    if name == "float32_matmul_precision":
        return type(value) is str and value in ("highest", "high", "medium")
    return type(value) is bool


def restore_host_generators(saved: RandomStates) -> None:
    """Restore the saved states of numpy's and Python's generators."""
    if saved.numpy is not None:
        np.random.set_state(saved.numpy)
    if saved.python is not None:
        random.setstate(saved.python)


def _entry_point(model: nn.Module, method: str) -> Callable[..., Any]:
    """Return what calls the model; a recorded method is called in place of forward, so that hooks see it."""
    if not method:
        return model

    def once(*args: Any, **kwargs: Any) -> Any:
        del model.forward  # the method may call the model itself
        own = getattr(model, method)
        # A LightningModule may ask for its optimizers, to log a learning rate or to call them itself.
        has_optimizers = hasattr(model, "manual_backward")
        return call_up_to_backward(model, own, *args, **kwargs) if has_optimizers else own(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        model.forward = once
        try:
            return model(*args, **kwargs)
        finally:
            vars(model).pop("forward", None)

    return call


@contextmanager
def _watching(model: nn.Module, recorded: Recorded) -> Iterator[dict[str, Any]]:
    """Yield a dict that collects the outputs of the watched modules."""
    inside: dict[str, Any] = {}
    with ExitStack() as stack:
        for name in recorded.watched:
            module = model.get_submodule(name)
            hook = module.register_forward_hook(lambda _, __, output, name=name: inside.update({name: output}))
            stack.callback(hook.remove)
        yield inside


@contextmanager
def in_mode(model: nn.Module, training: bool, recorded: Mapping[str, bool]) -> Iterator[None]:
    """Put the model in train or eval mode; if that is the recorded mode, every module in its own recorded mode."""
    with held(*((module, "training", module.training) for module in model.modules())):
        model.train(training)
        if recorded.get("") is training:
            flags = {unwrapped_name(name): flag for name, flag in recorded.items()}
            for name, module in model.named_modules():
                module.training = flags.get(unwrapped_name(name), training)
        yield


@contextmanager
def seeded(
    seed: int | None, device: torch.device, states: Sequence[torch.Tensor], recorded: Recorded
) -> Iterator[Callable[[], bool]]:
    """Seed torch, numpy and Python, and restore all three after; yield a function that tells if torch drew numbers.

    With a `seed` of None, start from the saved `states` of torch's generators and those in `recorded` of the others.
    """
    with generators_kept(device):
        random.seed(seed or 0)
        np.random.seed(seed or 0)
        _seed_torch(seed or 0, device)
        if seed is None:
            restore_generators(states, device)
            if recorded.rng is not None:
                restore_host_generators(recorded.rng)
        before = _generator_states(device)
        token = _from_saved_states.set(seed is None)
        try:
            yield lambda: any(not torch.equal(a, b) for a, b in zip(before, _generator_states(device), strict=True))
        finally:
            _from_saved_states.reset(token)


def _seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`, the only ones that are restored after a run.

    `torch.manual_seed` seeds every device; before CUDA is initialized it queues a call for each of them, with a
    traceback that takes milliseconds.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def call_up_to_backward(model: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the loss of the method's first `manual_backward` call, or the method's result if it makes none.

    Calls to its Trainer before that (optimizers, schedulers, toggling, logging) do nothing: no update precedes the
    backward pass.
    """
    idle = MagicMock()
    idle.step.side_effect = lambda closure=None, **_: closure() if closure is not None else None

    def optimizers(*_: Any, **__: Any) -> Any:
        count = _count_optimizers(model)
        return idle if count == 1 else [idle] * count

    stand_ins = {
        "manual_backward": _stop,
        "optimizers": optimizers,
        **dict.fromkeys(("lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer"), idle),
        **dict.fromkeys(("clip_gradients", "log", "log_dict"), idle),
    }
    vars(model).update(stand_ins)
    try:
        return method(*args, **kwargs)
    except _BackwardReached as reached:
        return reached.loss
    finally:
        for name in stand_ins:
            vars(model).pop(name, None)


class _BackwardReached(BaseException):  # the training's `except Exception` must not catch it
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def _stop(loss: Any, *_: Any, **__: Any) -> None:
    raise _BackwardReached(loss)


def _count_optimizers(model: Any) -> int:
    """Return how many optimizers `self.optimizers()` gives; 1 if that cannot be known without a Trainer."""
    made: Any = None
    with suppress(Exception):
        made = model.configure_optimizers()
    if isinstance(made, (list, tuple)):
        return len(made[0]) if made and isinstance(made[0], (list, tuple)) else len(made)
    return 1
