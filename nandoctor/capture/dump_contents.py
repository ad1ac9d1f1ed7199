"""What goes into a dump, put together when one is written.

In: a moment, its observer and the history. Out: the contents of a `nandoctor.dump/1` file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from nandoctor.capture.environment import read_backends, read_rank, read_versions
from nandoctor.capture.history import History, StepResult
from nandoctor.capture.source_info import describe_model
from nandoctor.capture.step import Moment, Observer
from nandoctor.dumps.recorded_format import FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """How the model and the loss are made: what the user told, and where their sources were when training began.

    `built`: `model` is the source of a builder, not of the model's class.
    """

    model: Mapping[str, str]
    loss: Mapping[str, str] | None
    arguments: Mapping[str, Any]
    built: bool
    method: str


def describe(
    moment: Moment, result: StepResult, event: str, observer: Observer, origins: Origins, history: History
) -> dict[str, Any]:
    """The contents of a dump, but for the scaler and the optimizer."""
    assert moment.before is not None
    model = observer.model
    before, lost = observer.describe(moment.before)
    function = getattr(model, origins.method or "forward")
    step, dropped = moment.describe(function, is_method=bool(origins.method))
    reference, unfit = describe_model(model, origins.model, origins.arguments, built=origins.built)
    return {
        "format": FORMAT,
        "event": _describe_event(moment, result, event),
        "model": reference,
        **before,
        **step,
        "method": origins.method,
        "loss_function": origins.loss,
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


def _describe_updates(moment: Moment) -> list[str]:
    number = moment.updates_since
    return (
        [f"the weights of the step: they are those after {number} further update{'s' * (number > 1)}"] if number else []
    )
