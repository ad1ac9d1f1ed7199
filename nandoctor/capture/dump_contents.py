"""Assemble the contents of a dump: the step, its state, and how the model was built and the loss is computed."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from nandoctor.capture.environment import (
    ProjectSources,
    class_of,
    describe_loss,
    describe_source,
    is_found,
    is_typed,
    read_rank,
    read_versions,
    source_file,
)
from nandoctor.capture.step import Observer, RecordedStep
from nandoctor.capture.tensors import is_sharded
from nandoctor.capture.updates import Update
from nandoctor.dumps.packing import pack
from nandoctor.dumps.recorded_format import FORMAT
from nandoctor.machine import memory_of
from nandoctor.process_wide import RECORDED, read_switches
from nandoctor.source_files import PACKAGE_FOLDERS, defines_code, find_typed
from nandoctor.step.argument_objects import NotDescribableError, describe_argument, find_standard
from nandoctor.torch_compat import tree_tensors
from nandoctor.trees import PLAIN

if TYPE_CHECKING:
    from nandoctor.capture.recorder import Recorder


LOG = logging.getLogger("nandoctor")


class Training:
    """Facts common to all steps of a run: how model and loss are built, and their sources as the run began.

    `model` is the source of the model's class, or of its builder, with its arguments; `notes` say what is lost of them.
    `files` are the project's files. Making it logs if a replay cannot import the loss.
    """

    def __init__(self, settings: Recorder, observer: Observer) -> None:
        model, builder, arguments = observer.model, settings.builder, settings.arguments or {}
        if isinstance(builder, functools.partial) and not builder.args:
            arguments = {**builder.keywords, **arguments}
            builder = builder.func
        source = describe_source(builder or class_of(model))
        built = builder is not None and not isinstance(builder, type)
        described, self.notes = _describe_arguments(arguments) if arguments or built else (_find_config(model), [])
        self.settings, self.observer = settings, observer
        self.model = {**source, "arguments": described}
        self.loss = loss = None if settings.loss is None else describe_loss(settings.loss)
        self.files = ProjectSources(source, loss)
        if loss is not None and not (loss["name"].isidentifier() and (loss["file"] or is_typed(loss))):
            LOG.warning(
                "nandoctor.Recorder: a replay cannot import the loss (%s), and cannot check gradients without it. Give "
                "it a function at the top level of a file of this project, def loss_of(output, batch), as "
                "loss=loss_of.",
                loss["name"].rpartition(".")[2] or loss["name"],
            )

    def describe(self, step: RecordedStep, reason: str, event: str, *, has_optimizer: bool) -> dict[str, Any]:
        """Return the contents of a dump of `step`."""
        assert step.before is not None
        settings, observer = self.settings, self.observer
        before, lost = observer.describe(step.before, step.undo or {})
        method = "training_step" if settings.training_step else "forward"
        calls, dropped = step.describe(getattr(observer.model, method), is_whole=settings.training_step)
        spoiled = step.spoiled if reason == "update" else None
        updater, unsaved = _describe_updater(spoiled, observer.model) if spoiled else ({}, [])
        rank, world_size = read_rank()
        return {
            "format": FORMAT,
            "event": {
                "event": event,
                "reason": reason,
                "step": step.step,
                "micro_batch": step.micro_batch,
                "epoch": step.epoch,
                "loss": None if step.loss is None else float(step.loss.float().mean()),
                "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
                "rank": rank,
                "world_size": world_size,
                "nonfinite_here": step.nonfinite_here,
                "nonfinite_ranks": step.nonfinite_ranks,
            },
            "model": self.model,
            **before,
            **calls,
            "method": method,
            "loss_function": self.loss,
            "sources": self.files.describe(),
            "scaler": _describe_scaler(settings.scaler, step),
            "update": _describe_update(spoiled) if spoiled else {},
            "updater": updater,
            "argv": [str(argument) for argument in sys.argv[1:]],
            "backends": {name: value for name, value in read_switches(RECORDED).items() if value is not None},
            "versions": read_versions(),
            "left_out": [
                *(*lost, *dropped, *self.notes, *unsaved),
                *_describe_writes(step, observer, has_optimizer=has_optimizer),
            ],
        }


def _describe_scaler(scaler: Any, step: RecordedStep) -> dict[str, Any]:
    """Return the scaler's state with the scale that this step had; empty without a scaler."""
    if scaler is None or step.loss_scale is None:
        return {}
    state = {key: value for key, value in scaler.state_dict().items() if isinstance(value, (int, float))}
    return {**state, "scale": step.loss_scale}


def _describe_update(spoiled: Update) -> dict[str, Any]:
    """Return which optimizer turned finite gradients into non-finite weights, which weights, and its settings.

    Of a numeric setting, that is the first non-finite value among the groups, else the last.
    """
    settings: dict[str, float] = {}
    for name, value in (item for group in spoiled.groups for item in group.items()):
        if type(value) in (int, float) and math.isfinite(settings.get(name, 0.0)):
            settings[name] = float(value)
    return {
        "optimizer": type(spoiled.optimizer).__name__,
        "parameters": spoiled.trained.nonfinite(),
        "settings": settings,
        "largest_gradient": None if spoiled.gradients is None else max(spoiled.gradients.values()),
    }


def _describe_updater(spoiled: Update, model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return what makes the optimizer again: its class and attributes, and its groups and state by name.

    Attributes and settings are described as a model's arguments are; what a replay cannot make again is left out.
    Nothing but a note if the state is sharded, since a reader would lack the other ranks' parts.
    """
    optimizer = spoiled.optimizer
    if any(map(is_sharded, tree_tensors(list(optimizer.state.values())))):
        return {}, ["optimizer: its state, which is spread over ranks"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    groups = [
        {**group, "params": list(filter(None, map(names.get, map(id, group["params"]))))} for group in spoiled.groups
    ]
    return {
        **describe_source(type(optimizer)),
        "arguments": {**_describe_possible(attributes), "defaults": _describe_possible(optimizer.defaults)},
        "groups": list(map(_describe_possible, groups)),
        "state": {names[id(p)]: dict(state) for p, state in optimizer.state.items() if id(p) in names},
    }, []


def _describe_possible(values: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(Exception):  # a user's object may raise at any access
            plain[name] = describe_argument(value, _describe_importable)
    return plain


def _describe_writes(step: RecordedStep, observer: Observer, *, has_optimizer: bool) -> list[str]:
    """Return a note if the file's weights are not known to be those of the forward."""
    is_skip = step.num_updates > 0 and step.was_skipped and not step.skipped  # a skip of this step is no update
    number = 0 if step.undo is not None else step.num_updates - is_skip
    if number:
        return [f"the weights of the step: those in the file are {number} update{'s' * (number > 1)} newer"]
    if step.was_rewritten or (not step.num_updates and observer.was_written(step.stamp)):
        return ["the weights of the step: the loop has overwritten them since the forward, without an optimizer"]
    if not step.num_updates and not has_optimizer and step.gradients_nonfinite:
        return ["the weights of the step: no optimizer was seen, so the loop may have overwritten them"]
    return []


def fit_into(contents: Mapping[str, Any], max_nbytes: int) -> Mapping[str, Any]:
    """Return the contents, without the weights and the optimizer if they exceed `max_nbytes`.

    The buffers stay: no checkpoint has those as they were. Raises ValueError if the rest does not fit either.
    """
    size, state, buffers = memory_of(tree_tensors(contents)), contents["state_dict"], contents["buffers"]
    if size <= max_nbytes:
        return contents
    left = {
        **contents,
        "state_dict": {name: state[name] for name in buffers},
        "shards": {name: shard for name, shard in contents["shards"].items() if name in buffers},
        "checkpoint": {"names": [name for name in state if name not in buffers]},
        "updater": {},
        "left_out": [*contents["left_out"], f"state_dict: the file would have {size} bytes, beyond {max_nbytes}"],
    }
    if (size := memory_of(tree_tensors(left))) > max_nbytes:
        raise ValueError(f"it has {size} bytes without the weights, and max_nbytes of the Recorder is {max_nbytes}")
    return left


def _describe_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return all arguments as plain data, and notes on what is lost of those that a replay cannot make again."""
    plain: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in arguments.items():
        try:
            plain[name] = describe_argument(value, _describe_importable)
        except Exception:  # a user's object may raise at any access
            packed = pack(value, f"model.arguments.{name}")
            plain[name] = packed.tree
            notes += packed.notes
    return plain, notes


def _find_config(model: nn.Module) -> dict[str, Any]:
    """Describe the object that the model's class needs as its only argument, if the model holds it under that name.

    That is how models keep their configuration. Nothing but an object is taken: a number of that name may have been
    changed since.
    """
    try:
        parameters = inspect.signature(class_of(model)).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        needed = [p.name for p in named if p.default is p.empty]
        held = {name: vars(model).get(name) for name in needed}
        if len(held) != 1 or type(held[needed[0]]) in (*PLAIN, dict, list, tuple):
            return {}
        return {name: describe_argument(value, _describe_importable) for name, value in held.items()}
    except Exception:  # the class has no signature, or a user's object raises at any access
        return {}


def _describe_importable(thing: Any) -> dict[str, str]:
    """Return the source of a class or function; raise NotDescribableError if a replay would not import it."""
    source = describe_source(thing)
    if find_standard(source) is thing:
        return source
    name, path = source["name"], source_file(thing)
    if "<" in name or not is_found(thing):
        raise NotDescribableError
    if find_typed(source["module"], name) is thing and not source["file"]:
        return source
    is_own = bool(source["file"]) and not Path(source["file"]).is_absolute()
    # Python's own are not imported for a dump, nor is what lies elsewhere.
    is_packaged = path is not None and not source["file"] and not PACKAGE_FOLDERS.isdisjoint(path.parts)
    if path is None or not (is_own or is_packaged) or not defines_code(path, name, own=is_own):
        raise NotDescribableError
    return source
