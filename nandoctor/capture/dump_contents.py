"""Assemble the contents of a dump when one is written; weights too large for it are left to a checkpoint."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from nandoctor.capture.environment import read_backends, read_rank, read_versions
from nandoctor.capture.model_rebuild import Training, describe_model
from nandoctor.capture.observer import Observer
from nandoctor.capture.sharding import is_sharded
from nandoctor.capture.step import RecordedStep
from nandoctor.capture.step_policy import StepHistory, StepResult
from nandoctor.capture.updates import Update
from nandoctor.dumps.recorded_format import FORMAT
from nandoctor.dumps.weights import sample_weights
from nandoctor.dumps.writer import fit_into
from nandoctor.machine import memory_of
from nandoctor.tracing.tensor_tree import walk_tensors

LOG = logging.getLogger("nandoctor")


def describe(
    training: Training,
    step: RecordedStep,
    result: StepResult,
    event: str,
    *,
    history: StepHistory,
    optimizers: Sequence[Optimizer],
) -> dict[str, Any]:
    """Return the contents of a dump of `step`."""
    assert step.before is not None
    settings, observer = training.settings, training.observer
    before, lost = observer.describe(step.before, step.undo or {})
    function = getattr(observer.model, settings.method or "forward")
    calls, dropped = step.describe(function, is_method=bool(settings.method))
    spoiled = step.spoiled if result.reason == "update" else None
    model = describe_model(training)
    optimizer, unsaved = _describe_optimizer(spoiled, optimizers, with_state=settings.keep_optimizer)
    return {
        "format": FORMAT,
        "event": _describe_event(step, result, event),
        "model": model,
        **before,
        **calls,
        "method": settings.method,
        "loss_function": training.loss,
        "sources": training.files.describe(),
        "scaler": _describe_scaler(settings.scaler, step),
        "optimizer": optimizer,
        "update": _describe_update(spoiled) if spoiled else {},
        "argv": [str(argument) for argument in sys.argv[1:]],
        "backends": read_backends(),
        "history": history.to_plain(),
        "versions": read_versions([model["module"], *(["transformers"] if model.get("config") else [])]),
        "left_out": [
            *(*lost, *dropped, *training.arguments.notes, *unsaved),
            *_describe_writes(step, observer, has_optimizer=bool(optimizers)),
        ],
    }


def _describe_scaler(scaler: Any, step: RecordedStep) -> dict[str, Any]:
    """Return the scaler's state with the scale that this step had; empty without a scaler."""
    if scaler is None or step.loss_scale is None:
        return {}
    state = {key: value for key, value in scaler.state_dict().items() if isinstance(value, (int, float))}
    return {**state, "scale": step.loss_scale}


def _describe_optimizer(
    spoiled: Update | None, optimizers: Iterable[Optimizer], *, with_state: bool
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the state dict of the model's first optimizer (lr, eps, betas), without state unless asked, and notes.

    An optimizer whose update left non-finite weights is saved instead, with its state, which it may have divided by.
    Only the settings are saved, with a note, if the state is sharded, since a reader would lack the other ranks' parts.
    """
    optimizer = spoiled.optimizer if spoiled else next(iter(optimizers), None)
    if optimizer is None:
        return None, []
    try:
        saved = optimizer.state_dict()
    except Exception as error:
        return None, [f"optimizer: its state_dict raised {type(error).__name__}: {error}"]
    bare = {**saved, "state": {}}
    if not with_state and spoiled is None:
        return bare, []
    if any(is_sharded(tensor) for _, tensor in walk_tensors(saved["state"])):
        return bare, ["optimizer: its state, which is spread over ranks"]
    return saved, []


def _describe_update(spoiled: Update) -> dict[str, Any]:
    """Return which optimizer turned finite gradients into non-finite weights, which weights, and its settings."""
    return {
        "optimizer": type(spoiled.optimizer).__name__,
        "parameters": spoiled.trained.nonfinite(),
        "settings": spoiled.settings(),
        "largest_gradient": None if spoiled.gradients is None else spoiled.gradients.values()[0],
    }


def _describe_event(step: RecordedStep, result: StepResult, event: str) -> dict[str, Any]:
    rank, world_size = read_rank()
    return {
        "event": event,
        "reason": result.reason,
        "step": step.step,
        "micro_batch": step.micro_batch,
        "epoch": step.epoch,
        "loss": None if step.loss is None else float(step.loss.float().mean()),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "rank": rank,
        "world_size": world_size,
        "nonfinite_here": step.nonfinite_here,
        "nonfinite_ranks": step.nonfinite_ranks,
    }


def _describe_writes(step: RecordedStep, observer: Observer, *, has_optimizer: bool) -> list[str]:
    """Return a note if the file's weights are not known to be those of the forward."""
    number = 0 if step.undo is not None else step.updates_since
    if number:
        return [f"the weights of the step: those in the file are {number} update{'s' * (number > 1)} newer"]
    if step.was_rewritten or (not step.num_updates and observer.was_written(step.stamp)):
        return ["the weights of the step: the loop has overwritten them since the forward, without an optimizer"]
    if not step.num_updates and not has_optimizer and step.gradients_nonfinite:
        return ["the weights of the step: no optimizer was seen, so the loop may have overwritten them"]
    return []


def leave_weights(contents: Mapping[str, Any], max_nbytes: int) -> Mapping[str, Any]:
    """Return the contents without the weights, which a replay takes from a checkpoint, if they exceed `max_nbytes`.

    Buffers stay: the forward writes to them, so no checkpoint has them as they were. So do a few values of each weight,
    unless it is sharded, so that a replay can check whether a checkpoint is of this step.
    """
    state, shards = contents["state_dict"], contents["shards"]
    if "state_dict" in fit_into(contents, max_nbytes) or not state:
        return contents
    buffers = {name: state[name] for name in contents["buffers"]}
    weights = {name: tensor for name, tensor in state.items() if name not in buffers}
    samples = sample_weights({name: tensor for name, tensor in weights.items() if name not in shards})
    size = memory_of(weights.values())
    return {
        **contents,
        "state_dict": buffers,
        "shards": {name: shard for name, shard in shards.items() if name in buffers},
        "checkpoint": {"samples": {name: {"at": found.at, "values": found.values} for name, found in samples.items()}},
        "left_out": [*contents["left_out"], f"state_dict: the weights, {size} bytes, beyond the cap of {max_nbytes}"],
    }
