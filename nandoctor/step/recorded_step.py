"""Make the calls that the recorder saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from nandoctor.dumps.packing import fill
from nandoctor.dumps.recorded_format import Call, Recorded
from nandoctor.engine.call import restore_generators, this_run
from nandoctor.errors import ModelError
from nandoctor.step.binding import Binding, spell
from nandoctor.torch_compat import unobserved
from nandoctor.tracing.tensor_stats import walk_tensors

Tensors = Mapping[str, torch.Tensor]

_with_grad: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
"""For each saved input that required a gradient, the tensor that the last call got for it."""


def bind_calls(recorded: Recorded, device: torch.device, missing: Sequence[str] = ()) -> Binding:
    """Bind the training's calls to their recorded arguments; several calls give the list of their outputs.

    Raises:
        ModelError: no tensor that the model was called with is in the file, and `missing` says why.
    """
    names = recorded.inputs
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
    return Binding(description=f"{what}({shown}){times}", arrays=names, forward=forward)


def _call(model: nn.Module, method: str, call: Call, tensors: Tensors, device: torch.device) -> Any:
    if call.rng is not None and this_run.from_saved_states:
        restore_generators(call.rng.torch_states, call.rng, device)
    for name in call.with_grad:
        _with_grad[tensors[name]] = _require_grad(tensors[name])
    tensors = as_passed(tensors)
    return _entry_point(model, method)(*fill(call.args, tensors, device), **fill(call.kwargs, tensors, device))


def as_passed(tensors: Tensors) -> Tensors:
    """Return the tensors as passed to the model, so that a loss can ask for gradients of those in its batch."""
    return {name: _with_grad.get(tensor, tensor) for name, tensor in tensors.items()} if _with_grad else tensors


def _require_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that requires grad, as if from an upstream model; reentrant checkpointing needs such an input."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor
    with unobserved():
        return tensor.detach().requires_grad_().clone()  # not a leaf: a model may write to its input in place


def own_loss(place: str) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss function that reads the loss at `place` in the model's output; without one, the whole output."""

    def loss(output: Any, _: Any) -> torch.Tensor:
        found = dict(walk_tensors(output))
        value = found[place if place in found else ""]
        return value if value.dim() == 0 else value.mean()

    return loss


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

    stand_ins: dict[str, Any] = {
        "manual_backward": _stop,
        "optimizers": optimizers,
        **dict.fromkeys(("lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer"), idle),
        **dict.fromkeys(("clip_gradients", "log", "log_dict"), idle),
    }
    with patch.multiple(model, create=True, **stand_ins):
        try:
            return method(*args, **kwargs)
        except _BackwardReached as reached:
            return reached.args[0]


class _BackwardReached(BaseException):
    """Its argument is the loss; the training's `except Exception` must not catch it."""


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
