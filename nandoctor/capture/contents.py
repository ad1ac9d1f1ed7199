"""What goes into a dump, put together when one is written.

In: a moment, its observer and the history. Out: the contents of a `nandoctor.dump/1` file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nandoctor.capture.circumstances import read_backends, read_rank, read_versions
from nandoctor.capture.history import History, StepResult
from nandoctor.capture.moment import Moment, Observer
from nandoctor.capture.sources import describe_model, describe_source, describe_spec
from nandoctor.dumps.recorded import FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """What the user told of how the model and the loss are made."""

    builder: Callable[..., nn.Module] | str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None
    method: str = ""


def describe(
    moment: Moment, result: StepResult, event: str, observer: Observer, origins: Origins, history: History
) -> dict[str, Any]:
    """The contents of a dump, but for the scaler and the optimizer."""
    assert moment.before is not None
    model = observer.model
    before, lost = observer.describe(moment.before)
    function = getattr(model, origins.method or "forward")
    step, dropped = moment.describe(function, is_method=bool(origins.method))
    reference, unfit = describe_model(model, origins.builder, origins.arguments)
    return {
        "format": FORMAT,
        "event": _describe_event(moment, result, event),
        "model": reference,
        **before,
        **step,
        "method": origins.method,
        "loss_function": _describe_loss(origins.loss),
        "backends": read_backends(),
        "history": history.to_plain(),
        "versions": read_versions([reference["module"], *(["transformers"] if reference.get("config") else [])]),
        "left_out": [*lost, *dropped, *unfit, *_describe_updates(moment)],
    }


def describe_scaler(scaler: Any, moment: Moment) -> dict[str, Any]:
    """The scaler's state, with the scale that this step had."""
    if scaler is None or moment.scale is None:
        return {}
    state = {key: value for key, value in scaler.state_dict().items() if isinstance(value, (int, float))}
    return {**state, "scale": float(moment.scale)}


def describe_optimizers(optimizers: Iterable[Optimizer]) -> dict[str, Any] | None:
    """The state of the first optimizer of the model."""
    return next((optimizer.state_dict() for optimizer in optimizers), None)


def _describe_event(moment: Moment, result: StepResult, event: str) -> dict[str, Any]:
    rank, world_size = read_rank()
    return {
        "event": event,
        "reason": result.reason,
        "step": moment.step,
        "epoch": moment.epoch,
        "loss": None if moment.loss is None else float(moment.loss),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "rank": rank,
        "world_size": world_size,
        "nonfinite_here": moment.bad_here,
    }


def _describe_loss(loss: Callable[..., Any] | str | None) -> dict[str, Any] | None:
    if loss is None:
        return None
    return describe_spec(loss) if isinstance(loss, str) else describe_source(loss)


def _describe_updates(moment: Moment) -> list[str]:
    number = moment.updates_since
    return (
        [f"the weights of the step: they are those after {number} further update{'s' * (number > 1)}"] if number else []
    )
