"""Describe how a model was built and its loss is computed, and find out whether a replay can do so without flags."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


class ModelArguments(NamedTuple):
    """Arguments by name, as plain data.

    `is_odd`: a replay cannot make some of them again; `notes` say what is lost of these.
    """

    plain: dict[str, Any]
    is_odd: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Facts common to all steps of a run: how model and loss are built, and their sources as the run began.

    `model` is the source of the model's class, or of its builder. `files` are the project's files. `in_notebook`: only
    this notebook, which defines the model's class, can replay the steps without flags.
    """

    settings: Recorder
    observer: Observer
    model: Mapping[str, str]
    loss: Mapping[str, str] | None
    arguments: ModelArguments
    files: ProjectSources
    in_notebook: bool


def describe_training(settings: Recorder, observer: Observer) -> Training:
    """Return what all files of a run have in common; log if a replay cannot import the loss."""
    model, builder, arguments = observer.model, settings.builder, settings.arguments or {}
    if isinstance(builder, functools.partial) and not builder.args:
        arguments = {**builder.keywords, **arguments}
        builder = builder.func
    source = describe_source(builder or class_of(model))
    built = builder is not None and not isinstance(builder, type)
    loss = None if settings.loss is None else describe_loss(settings.loss)
    described = describe_arguments(arguments) if arguments or built else find_config(model)
    if loss is not None:
        _advise_loss(loss)
    return Training(
        settings=settings,
        observer=observer,
        model=source,
        loss=loss,
        arguments=described,
        files=ProjectSources(source, loss),
        in_notebook=is_typed(source),
    )


def describe_arguments(arguments: Mapping[str, Any]) -> ModelArguments:
    """Describe all arguments; one that cannot be made again is kept as far as it is plain data."""
    plain: dict[str, Any] = {}
    notes: list[str] = []
    is_odd = False
    for name, value in arguments.items():
        try:
            plain[name] = describe_argument(value, _describe_importable)
        except Exception:  # a user's object may raise at any access
            packed = pack(value, f"model.arguments.{name}")
            plain[name] = packed.tree
            notes += packed.notes
            is_odd = True
    return ModelArguments(plain, is_odd, tuple(notes))


def find_config(model: nn.Module) -> ModelArguments:
    """Describe the object that the model's class needs as its only argument, if the model holds it under that name.

    That is how models keep their configuration. Nothing but an object is taken: a number of that name may have been
    changed since.
    """
    nothing = ModelArguments({})
    try:
        parameters = inspect.signature(class_of(model)).parameters.values()
    except Exception:  # it has no signature, or a user's own one
        return nothing
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if len(needed) != 1:
        return nothing
    name = needed[0].name
    value = vars(model).get(name)
    if type(value) in (*PLAIN, dict, list, tuple):
        return nothing
    described = describe_arguments({name: value})
    return nothing if described.is_odd else described


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
