"""The loss of a step: the user's, the one that the dump names, or the one that the model returns itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nandoctor.dumps.dump import Dump
from nandoctor.errors import LossError
from nandoctor.machine import is_out_of_memory
from nandoctor.replaying.code_references import find_loss
from nandoctor.replaying.model_loading import find_attribute
from nandoctor.replaying.recorded_step import own_loss
from nandoctor.replaying.saved_arrays import MakeBatch, describe_batch
from nandoctor.replaying.settings import Settings
from nandoctor.replaying.user_code import kept_running, place_of

NOT_UNDER_AUTOCAST = "unsafe to autocast"
"""What torch says where a loss is refused under autocast; it is computed outside of it then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLoss:
    """A loss as it was found, None without one, and notes on that; the `field` is the model's own, by its place."""

    function: Callable[..., Any] | None = None
    field: str | None = None
    notes: tuple[str, ...] = ()

    def bind(self, dump: Dump, make: MakeBatch) -> Callable[..., Any] | None:
        """The loss as a function of the output and the arrays by name."""
        if self.function is None:
            return None if self.field is None else own_loss(self.field)
        num_calls = len(dump.recorded.calls) if dump.recorded is not None else 1
        returned = f"the list of what {num_calls} calls returned" if num_calls > 1 else "what the model returned"
        return _checked(self.function, make, returned)


def find_step_loss(dump: Dump, settings: Settings) -> FoundLoss:
    """The loss that the user named, else the dump's function, else the one that the model returns itself."""
    spec = settings.loss
    function = find_attribute(spec, directory=settings.directory) if isinstance(spec, str) else spec
    if function is not None or dump.recorded is None:
        return FoundLoss(function=function)
    function, notes = find_loss(dump.recorded.loss_function, dump.provenance)
    return FoundLoss(function=function, field=dump.recorded.loss_field, notes=tuple(notes))


def _checked(loss: Callable[..., Any], make: MakeBatch, returned: str) -> Callable[..., Any]:
    """The loss with a `LossError` for whatever goes wrong in it: the training may have called it with other things."""

    @functools.wraps(loss)
    def compute(output: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        batch = make(tensors)
        try:
            with kept_running():
                value = loss(output, batch)
        except Exception as error:
            if NOT_UNDER_AUTOCAST in str(error) or is_out_of_memory(error):
                raise
            raised = f"{type(error).__name__}{place_of(error)}: {error}"
            raise LossError(
                f"The loss function raised {raised} (its {describe_batch(batch)}).",
                remedy="To replay the backward pass, name with --loss FILE.py:NAME a function (output, batch) -> "
                f"scalar; output is {returned}.",
            ) from error
        return _as_scalar(value)

    return compute


def _as_scalar(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    is_tensor = isinstance(value, torch.Tensor)
    what = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
    raise LossError(
        f"The loss function returned {what}.",
        remedy="The function that --loss names must return a tensor with one element, such as loss.mean().",
    )
