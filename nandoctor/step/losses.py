"""Makes the user's loss a function of the output and the arrays of a dump."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.classify import role_of
from nandoctor.dumps.dump import Dump
from nandoctor.engine.user_code import NOT_UNDER_AUTOCAST, WRONG_CALL, kept_running, raised_at
from nandoctor.errors import LossError
from nandoctor.machine import is_out_of_memory
from nandoctor.process_wide import generators_kept
from nandoctor.step.binding import LOSS, LOSS_OF_SEVERAL, Offer, Signature, bind, read_signature, the_only_array
from nandoctor.step.recorded_step import own_loss

MakeBatch = Callable[[Mapping[str, torch.Tensor]], Any]
"""Builds the loop's batch from arrays by name."""


def bind_loss(
    loss: Callable[..., Any] | None, dump: Dump, make: MakeBatch, used: Collection[str] = ()
) -> Callable[..., Any] | None:
    """Return the loss as a function of output and arrays by name; without one, that which the model itself returns.

    A recorder's loss takes the batch. Any other may take parts of it by their names instead: of the ways to call it,
    the likelier is tried first. `used` are the arrays that the model takes.
    """
    if loss is None:
        field = dump.recorded.loss_field
        return own_loss(field) if field is not None else None
    num_calls = len(dump.recorded.calls)
    returned = f"the list of what {num_calls} calls returned" if num_calls > 1 else "what the model returned"
    first_raised = False

    def call(output: Any, batch: Any) -> Any:
        nonlocal first_raised
        ways = [partial(loss, output, batch)] if dump.is_recorded else _find_ways(loss, output, batch, used)
        if not first_raised and len(ways) > 1:
            try:
                with generators_kept():
                    return ways[0]()
            except WRONG_CALL:
                first_raised = True
        return ways[-1]()

    return functools.update_wrapper(_checked(call, make, returned), loss)


def _find_ways(loss: Callable[..., Any], output: Any, batch: Any, used: Collection[str]) -> list[Callable[[], Any]]:
    """Return the ways to call a loss, the likelier first: with the batch, and with parts of it for all parameters.

    `loss(logit, mask)` of a batch with a mask is called with that, unless it uses the parameter as a dict; other names
    are matched by the rules of `binding.LOSS`.
    """
    whole = partial(loss, output, batch)
    signature = read_signature(loss.forward if isinstance(loss, nn.Module) else loss)
    others, is_open = signature.named[1:], bool(signature.variadic or signature.keywords)
    if signature.named and not others and not is_open:
        return [partial(loss, output), whole]
    if isinstance(batch, Mapping):
        keys = [signature.mappings[p.name] for p in others if p.name in signature.mappings]
        whole = partial(loss, output, _part_with(keys[0], batch)) if keys else whole
        given = _bind_parts(signature, output, batch, () if keys else used) or {}
        if len(given) <= is_open:  # *args may be meant for the batch
            return [whole]
        parts = partial(loss, **given)
        return [whole, parts] if keys else [parts, whole]
    taken = sum(p.default is p.empty for p in others)  # targets come last
    fits = isinstance(batch, list | tuple) and 0 < taken < len(batch)
    return [whole, partial(loss, output, *batch[-taken:])] if fits else [whole]


def _part_with(keys: Collection[str], batch: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the batch; if it lacks `keys`, the dict in it that has them, or all of these in one."""
    inner = [part for part in batch.values() if isinstance(part, Mapping)]
    joined = {key: value for part in (*inner, batch) for key, value in part.items()}
    return next((part for part in (batch, *inner, joined) if part.keys() >= set(keys)), batch)


def _bind_parts(
    signature: Signature, output: Any, batch: Mapping[Any, Any], used: Collection[str]
) -> dict[str, Any] | None:
    """Return the arguments of a loss that takes parts of the batch, by the names of its parameters; None if unclear.

    An array that the model did not use may be its target, whatever its name.
    """
    values = {str(name): part for name, part in batch.items()}
    of_output = signature.named[0].name if signature.named else ""
    arrays = [name for name, part in values.items() if isinstance(part, torch.Tensor) and name != of_output]
    others, offer = replace(signature, named=signature.named[1:]), Offer(values=values, arrays=arrays)
    bound = bind(others, offer, LOSS)
    required = others.required({})
    if len(required) == 1 and not bound and used:
        unused = [name for name in arrays if name not in used and values[name].dim() and role_of(name) != "output"]
        bound = the_only_array(others, Offer(values=values, arrays=unused), bound)
    if all(p.name in bound for p in required) and signature.named:
        return {signature.named[0].name: output, **{name: values[str(source)] for name, source in bound.items()}}
    return _spread(signature, output, offer)


def _spread(signature: Signature, output: Any, offer: Offer) -> dict[str, Any] | None:
    """Return the arguments of a loss that takes the model's several outputs, by their names or else in their order.

    `loss(recon_x, x, mu, logvar)` of a batch with an x takes three outputs; None if not as many are left.
    """
    bound = bind(signature, offer, LOSS_OF_SEVERAL)
    left = [p.name for p in signature.required(bound)]
    given = {name: offer.values[str(source)] for name, source in bound.items()}
    output = output._asdict() if hasattr(output, "_asdict") else output  # a namedtuple
    if isinstance(output, Mapping):
        return {**given, **{name: output[name] for name in left}} if left and output.keys() >= set(left) else None
    # A loss of two may take the output as it is, and a target whose name is not known.
    is_several = isinstance(output, tuple | list) and len(output) == len(left) > 1 and len(signature.named) > 2
    return {**given, **dict(zip(left, output, strict=True))} if is_several else None


def _loss_in(made: Any) -> Any:
    """Return the loss of what a function returns: the first of a tuple, as beside logs, or the "loss" of a dict."""
    if isinstance(made, tuple | list) and made:
        return made[0]
    return made.get("loss", made) if isinstance(made, Mapping) else made


def _checked(loss: Callable[..., Any], make: MakeBatch, returned: str) -> Callable[..., Any]:
    """Wrap the loss so that any error in it is a `LossError`: the training may have called it with other arguments."""

    def compute(output: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        batch = make(tensors)
        try:
            with kept_running():
                value = _loss_in(loss(output, batch))
        except Exception as error:
            if NOT_UNDER_AUTOCAST in str(error) or is_out_of_memory(error):
                raise
            raised = f"{type(error).__name__}{raised_at(error)}: {error}"
            names = f"has {', '.join(map(str, batch)) or 'nothing in it'}" if isinstance(batch, Mapping) else ""
            raise LossError(
                f"The loss function raised {raised} (its batch {names or f'is a {type(batch).__name__}'}).",
                remedy="To replay the backward pass, name with --loss FILE.py:NAME a function (output, batch) -> "
                f"scalar; output is {returned}.",
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
