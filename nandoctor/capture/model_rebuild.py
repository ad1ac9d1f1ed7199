"""Describe how a model was built and its loss is computed, and find out whether a replay can do so without flags."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from nandoctor.capture.observer import Observer
from nandoctor.capture.source_info import (
    ProjectSources,
    class_of,
    describe_loss,
    describe_source,
    is_found,
    is_typed,
    source_file,
)
from nandoctor.dumps.packing import pack
from nandoctor.source_files import PACKAGE_FOLDERS, defines_code, find_typed
from nandoctor.step.argument_objects import NotDescribableError, describe_argument, find_standard
from nandoctor.trees import PLAIN

if TYPE_CHECKING:
    from nandoctor.capture.recorder import Recorder

LOG = logging.getLogger("nandoctor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Facts common to all steps of a run: how model and loss are built, and their sources as the run began.

    `model` is the source of the model's class, or of its builder, with its arguments; `notes` say what is lost of them.
    `files` are the project's files.
    """

    settings: Recorder
    observer: Observer
    model: Mapping[str, Any]
    notes: Sequence[str]
    loss: Mapping[str, str] | None
    files: ProjectSources


def describe_training(settings: Recorder, observer: Observer) -> Training:
    """Return what all files of a run have in common; log if a replay cannot import the loss."""
    model, builder, arguments = observer.model, settings.builder, settings.arguments or {}
    if isinstance(builder, functools.partial) and not builder.args:
        arguments = {**builder.keywords, **arguments}
        builder = builder.func
    source = describe_source(builder or class_of(model))
    built = builder is not None and not isinstance(builder, type)
    loss = None if settings.loss is None else describe_loss(settings.loss)
    described, notes = describe_arguments(arguments) if arguments or built else (find_config(model), [])
    if loss is not None:
        _advise_loss(loss)
    return Training(
        settings=settings,
        observer=observer,
        model={**source, "arguments": described},
        notes=notes,
        loss=loss,
        files=ProjectSources(source, loss),
    )


def describe_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
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


def find_config(model: nn.Module) -> dict[str, Any]:
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


def _advise_loss(source: Mapping[str, str]) -> None:
    """Log what to change if a replay cannot import the loss: it is not at the top level of a file, or installed."""
    if source["name"].isidentifier() and (source["file"] or is_typed(source)):
        return
    LOG.warning(
        "nandoctor.Recorder: a replay cannot import the loss (%s), and cannot check gradients without it. Give it a "
        "function at the top level of a file of this project, def loss_of(output, batch), as loss=loss_of.",
        source["name"].rpartition(".")[2] or source["name"],
    )
