"""Make the calls of a step: of the model as the recorder saw them, of the user's loss with the arrays of a dump."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

from nandoctor.dumps.classify import role_of
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.packing import fill, with_attributes
from nandoctor.engine.call import restore_generators, this_run
from nandoctor.engine.user_code import NOT_UNDER_AUTOCAST, WRONG_CALL, kept_running, raised_at
from nandoctor.errors import LossError, ModelError
from nandoctor.machine import is_out_of_memory
from nandoctor.process_wide import generators_kept
from nandoctor.step.binding import (
    LOSS,
    LOSS_OF_SEVERAL,
    Binding,
    Offer,
    Signature,
    bind,
    read_signature,
    the_only_array,
)
from nandoctor.text import brief
from nandoctor.tracing.tensor_stats import walk_tensors
from nandoctor.trees import walk

Tensors = Mapping[str, torch.Tensor]


def bind_calls(dump: Dump, device: torch.device) -> Binding:
    """Bind the training's calls to their recorded arguments; several calls give the list of their outputs.

    Raises:
        ModelError: no tensor that the model was called with is in the file, which says why.
    """
    recorded, names = dump.recorded, dump.recorded.inputs
    numbers = {"global_step": dump.step, "current_epoch": dump.scalars_by_last_name.get("epoch")}
    trainer = Trainer(**{name: number for name, number in numbers.items() if number is not None})
    lost = [text for text in dump.missing if text.startswith("input.")]
    if lost and not names:
        raise ModelError(
            f"What the model was called with is not in the file: {lost[0]}.",
            remedy="Name saved arrays in its place, in the order of forward's parameters, with --inputs (`nandoctor "
            "inspect` lists them), or give --call file.py:function, a (model, batch) -> output.",
        )

    def forward(model: nn.Module, tensors: Mapping[str, Any]) -> Any:
        inside: dict[str, Any] = {}
        with ExitStack() as hooks:
            for name in recorded.watched:
                module = model.get_submodule(name)
                hook = module.register_forward_hook(lambda _, __, output, name=name: inside.update({name: output}))
                hooks.enter_context(hook)
            entry, returned = _entry_point(model, recorded.method, trainer), []
            for call in recorded.calls:
                if call.rng is not None and this_run.from_saved_states:
                    restore_generators(call.rng.torch_states, call.rng, device)
                returned.append(entry(*fill(call.args, tensors, device), **fill(call.kwargs, tensors, device)))
        output = returned[0] if len(returned) == 1 else returned
        if not recorded.method:
            return output
        return {"returned": output.get("loss") if isinstance(output, Mapping) else output, **inside}

    what = f"model.{recorded.method}" if recorded.method else "model"
    first = recorded.calls[0]
    more = (f"args[{place}]" for place in range(len(first.names), len(first.args)))
    given = (*first.names[: len(first.args)], *more, *(f"{name}={name}" for name in first.kwargs))
    shown = ", ".join(map(brief, given))
    times = f", {len(recorded.calls)} calls" if len(recorded.calls) > 1 else ""
    return Binding(description=f"{what}({shown}){times}", arrays=names, forward=forward)


def own_loss(place: str) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss function that reads the loss at `place` in the model's output; without one, the whole output."""

    def loss(output: Any, _: Any) -> torch.Tensor:
        found = dict(walk_tensors(output))
        value = found[place if place in found else ""]
        return value if value.dim() == 0 else value.mean()

    return loss


class Trainer(SimpleNamespace):
    """A stand-in for Lightning's Trainer: the numbers of the step, and that nobody logs, and no other process trains.

    Asked for anything else, it raises AttributeError: a number that the file does not have would be made up.
    """

    barebones, is_global_zero = True, True
    logger, loggers = None, ()
    global_rank, local_rank, world_size = 0, 0, 1


def _entry_point(model: Any, method: str, trainer: Trainer) -> Any:
    """Return what calls the model; a recorded method is called in place of forward, so that hooks see it."""
    if not method:
        return model

    # A LightningModule may ask for its optimizers, to log a learning rate or to call them itself, and for its Trainer.
    is_lightnings = hasattr(model, "manual_backward")

    def once(*args: Any, **kwargs: Any) -> Any:
        del model.forward  # the method may call the model itself
        own = getattr(model, method)
        return call_up_to_backward(model, own, *args, **kwargs) if is_lightnings else own(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        model.forward = once
        try:
            if is_lightnings:
                model.trainer = trainer
            return model(*args, **kwargs)
        finally:
            vars(model).pop("forward", None)
            if is_lightnings:
                model.trainer = None

    return call


def call_up_to_backward(model: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the loss of the method's first `manual_backward` call, or the method's result if it makes none.

    Calls to its Trainer before that (optimizers, schedulers, toggling, logging) do nothing: no update precedes the
    backward pass.
    """
    idle = MagicMock()
    idle.step.side_effect = lambda closure=None, **_: closure() if closure is not None else None

    def optimizers(*_: Any, **__: Any) -> Any:
        made: Any = None
        with suppress(Exception):  # it may need a Trainer; then there most likely is one
            made = model.configure_optimizers()
        if isinstance(made, list | tuple):
            made = made[0] if made and isinstance(made[0], list | tuple) else made  # else with schedulers
            return idle if len(made) == 1 else [idle] * len(made)
        return idle

    def stop(loss: Any, *_: Any, **__: Any) -> None:
        raise _BackwardReached(loss)

    ignored = ("lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer")
    stand_ins = dict.fromkeys((*ignored, "clip_gradients", "log", "log_dict"), idle)
    with patch.multiple(model, create=True, manual_backward=stop, optimizers=optimizers, **stand_ins):
        try:
            return method(*args, **kwargs)
        except _BackwardReached as reached:
            return reached.args[0]


class _BackwardReached(BaseException):
    """Its argument is the loss; the training's `except Exception` must not catch it."""


def bind_loss(
    loss: Callable[..., Any] | None, dump: Dump, make: Callable[[Tensors], Any], used: Collection[str] = ()
) -> Callable[..., Any] | None:
    """Return the loss as a function of output and arrays by name; without one, that which the model itself returns.

    A recorder's loss takes the batch, which `make` builds of the arrays. Any other may take parts of it by their names
    instead: of the ways to call it, the likelier is tried first. `used` are the arrays that the model takes.
    """
    if loss is None:
        field = dump.recorded.loss_field
        return own_loss(field) if field is not None else None
    num_calls = len(dump.recorded.calls)
    returned = f"the list of what {num_calls} calls returned" if num_calls > 1 else "what the model returned"
    num_wrong, is_settled = 0, False

    def call(output: Any, batch: Any) -> Any:
        nonlocal num_wrong, is_settled
        ways = [partial(loss, output, batch)] if dump.is_recorded else _find_ways(loss, output, batch, used)
        while num_wrong < len(ways) - 1 and not is_settled:  # a changed code that raises shows nothing of the call
            try:
                with generators_kept():
                    made = ways[num_wrong]()
                is_settled = True
                return made
            except WRONG_CALL:
                num_wrong += 1
        return ways[num_wrong]()

    return functools.update_wrapper(_checked(call, make, returned), loss)


def _find_ways(loss: Callable[..., Any], output: Any, batch: Any, used: Collection[str]) -> list[Callable[[], Any]]:
    """Return the ways to call a loss, the likelier first: with the batch, and with parts of it for all parameters.

    `loss(logit, mask)` of a batch with a mask is called with that, unless it uses the parameter as a dict; other names
    are matched by the rules of `binding.LOSS`.
    """
    loss, signature = _output_first(loss)
    whole = partial(_call_with_all, loss, output, batch)
    others, is_open = signature.named[1:], bool(signature.variadic or signature.keywords)
    if signature.named and not others and not is_open:
        return [partial(loss, output), whole]
    if isinstance(batch, Mapping):
        keys = [signature.mappings[p.name] for p in others if p.name in signature.mappings]
        whole = partial(_call_with_all, loss, output, _part_with(keys[0], batch)) if keys else whole
        given = _bind_parts(signature, output, batch, () if keys else used)
        parts = [partial(loss, **given)] if len(given) > is_open else []  # *args may be meant for the batch
        is_pair = isinstance(output, tuple) and len(output) == len(signature.required({})) > 1
        of_output = [partial(loss, *output)] if is_pair else []
        return [whole, *parts, *of_output] if keys else [*parts, whole, *of_output]
    taken = sum(p.default is p.empty for p in others)  # targets come last
    fits = isinstance(batch, list | tuple) and 0 < taken < len(batch)
    return [whole, partial(loss, output, *batch[-taken:])] if fits else [whole]


def _call_with_all(loss: Callable[..., Any], output: Any, batch: Any) -> Any:
    """Call a loss with the batch; if it asks for attributes, as of a dataclass saved as a dict, its items are those."""
    try:
        return loss(output, batch)
    except AttributeError:
        return loss(output, with_attributes(batch))


def _output_first(loss: Callable[..., Any]) -> tuple[Callable[..., Any], Signature]:
    """Return a loss that takes the output first, and its signature; `loss(target, logit)` and the like do not."""
    signature = read_signature(loss.forward if isinstance(loss, nn.Module) else loss)
    if not signature.named:
        return loss, signature
    first, *others = signature.named
    outputs, role = [p for p in others if role_of(p.name) == "output"], role_of(first.name)
    if len(outputs) != 1 or not (role == "target" or (role == "unknown" and first.name in signature.mappings)):
        return loss, signature
    name = outputs[0].name

    def call(*args: Any, **kwargs: Any) -> Any:
        output, rest = (kwargs.pop(name), args) if name in kwargs else (args[0], args[1:])
        return loss(*rest, **{name: output}, **kwargs)

    return call, replace(signature, named=(*outputs, *(p for p in signature.named if p.name != name)))


def names_taken(loss: Callable[..., Any] | None, arrays: Collection[str]) -> frozenset[str]:
    """Return the names of a loss's parameters beside the output's; none if an array has the name of that, too."""
    if loss is None:
        return frozenset()
    _, signature = _output_first(loss)
    output, *others = [p.name for p in signature.named] or [""]
    return frozenset() if output in arrays else frozenset(others)


def _part_with(keys: Collection[str], batch: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the batch; if it lacks `keys`, the dict in it that has them, or all of these in one."""
    inner = [part for part in batch.values() if isinstance(part, Mapping)]
    joined = {key: value for part in (*inner, batch) for key, value in part.items()}
    return next((part for part in (batch, *inner, joined) if part.keys() >= set(keys)), batch)


def _bind_parts(signature: Signature, output: Any, batch: Mapping[Any, Any], used: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a loss that takes parts of the batch, by the names of its parameters; none if unclear.

    An array that the model did not use may be its target, whatever its name.
    """
    values = {".".join(map(str, place)): part for place, part in walk(batch) if place}
    of_output = signature.named[0].name if signature.named else ""
    arrays = [name for name, part in values.items() if isinstance(part, torch.Tensor) and name != of_output]
    others, offer = replace(signature, named=signature.named[1:]), Offer(values=values, arrays=arrays)
    bound = bind(others, offer, LOSS)
    required = others.required({})
    if len(required) == 1 and not bound and used:
        unused = [name for name in arrays if name not in used and values[name].dim() and role_of(name) != "output"]
        bound = the_only_array(others, Offer(values=values, arrays=unused), bound)
    if of_output and all(p.name in bound for p in required):
        return {of_output: output, **{name: values[str(source)] for name, source in bound.items()}}
    return _spread(signature, output, offer)


def _spread(signature: Signature, output: Any, offer: Offer) -> dict[str, Any]:
    """Return the arguments of a loss that takes the model's several outputs, by their names or else in their order.

    `loss(recon_x, x, mu, logvar)` of a batch with an x takes three outputs; none are given if not as many are left.
    """
    bound = bind(signature, offer, LOSS_OF_SEVERAL)
    left = [p.name for p in signature.required(bound)]
    given = {name: offer.values[str(source)] for name, source in bound.items()}
    output = output._asdict() if hasattr(output, "_asdict") else output  # a namedtuple
    if isinstance(output, Mapping):
        return {**given, **{name: output[name] for name in left}} if left and output.keys() >= set(left) else {}
    # A loss of two may take the output as it is, and a target whose name is not known.
    is_several = isinstance(output, tuple | list) and len(output) == len(left) > 1 and len(signature.named) > 2
    return {**given, **dict(zip(left, output, strict=True))} if is_several else {}


def _checked(loss: Callable[..., Any], make: Callable[[Tensors], Any], returned: str) -> Callable[..., Any]:
    """Wrap the loss so that any error in it is a `LossError`: the training may have called it with other arguments.

    Of what it returns, the loss is the first of a tuple, as beside logs, or the "loss" of a dict.
    """

    def compute(output: Any, tensors: Tensors) -> torch.Tensor:
        batch = make(tensors)
        try:
            with kept_running():
                value = loss(output, batch)
                if isinstance(value, tuple | list) and value:
                    value = value[0]
                elif isinstance(value, Mapping):
                    value = value.get("loss", value)
        except Exception as error:
            if NOT_UNDER_AUTOCAST in str(error) or is_out_of_memory(error):
                raise
            raised = f"{type(error).__name__}{raised_at(error)}: {error}"
            names = f"has {', '.join(map(str, batch)) or 'nothing in it'}" if isinstance(batch, Mapping) else ""
            raise LossError(
                f"The loss function raised {raised} (its batch {names or f'is a {type(batch).__name__}'}).",
                remedy="To replay the backward pass, name with --loss FILE.py:NAME a function (output, batch) -> "
                f"scalar, which is not a method that needs self; output is {returned}.",
            ) from error
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value
        is_tensor = isinstance(value, torch.Tensor)
        what = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
        raise LossError(
            f"The loss function returned {what}.",
            remedy="The function that --loss names must return a tensor with one element, such as loss.mean().",
        )

    return compute
