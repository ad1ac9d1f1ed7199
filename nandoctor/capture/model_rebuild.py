"""Describe how a model was built and its loss is computed, and find out whether a replay can do so without flags."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from nandoctor.capture.observer import Observer
from nandoctor.capture.source_info import (
    ProjectSources,
    class_of,
    describe_loss,
    describe_source,
    is_elsewhere,
    is_found,
    is_own_function,
    is_typed,
    source_file,
)
from nandoctor.dumps.packing import pack
from nandoctor.source_files import PACKAGE_FOLDERS, defines_code, find_typed, is_installed
from nandoctor.step.argument_objects import NotDescribableError, describe_argument, find_standard
from nandoctor.trees import PLAIN

if TYPE_CHECKING:
    from nandoctor.capture.recorder import Recorder

LOG = logging.getLogger("nandoctor")
_CONTAINERS = (nn.Sequential.__init__, nn.ModuleList.__init__, nn.ModuleDict.__init__)
"""Constructors that are given the modules themselves, of which a model does not tell the code."""


class ModelArguments(NamedTuple):
    """Arguments by name, as plain data.

    `odd` names those that a replay cannot make again, and `notes` say what is lost of these.
    """

    plain: dict[str, Any]
    odd: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Facts common to all steps of a run: how model and loss are built, and their sources as the run began.

    `model` is the source of the model's class, or of its builder. `files` are the project's files. `flags`
    are those that a replay is known to need, None if only this notebook can replay the steps.
    """

    settings: Recorder
    observer: Observer
    model: Mapping[str, str]
    loss: Mapping[str, str] | None
    arguments: ModelArguments
    files: ProjectSources
    flags: str | None


def describe_training(settings: Recorder, observer: Observer) -> Training:
    """Return what all files of a run have in common; log what a replay cannot import or build."""
    model, builder, arguments = observer.model, settings.builder, settings.arguments or {}
    if isinstance(builder, functools.partial) and not builder.args:
        arguments = {**builder.keywords, **arguments}
        builder = builder.func
    source = describe_source(builder or class_of(model))
    built = builder is not None and not isinstance(builder, type)
    loss = None if settings.loss is None else describe_loss(settings.loss)
    described = describe_arguments(arguments) if arguments or built else find_config(model)
    advice = list(advise_rebuild(model, source, described, built=built))
    for line in (*advice, *(() if loss is None else advise_loss(loss))):
        LOG.warning("nandoctor.Recorder: %s", line)
    return Training(
        settings=settings,
        observer=observer,
        model=source,
        loss=loss,
        arguments=described,
        files=ProjectSources(source, loss),
        flags=" --model FILE.py:NAME" if advice else None if is_typed(source) else "",
    )


def describe_arguments(arguments: Mapping[str, Any]) -> ModelArguments:
    """Describe all arguments; one that cannot be made again is kept as far as it is plain data."""
    plain: dict[str, Any] = {}
    odd: list[str] = []
    notes: list[str] = []
    for name, value in arguments.items():
        try:
            plain[name] = describe_argument(value, _describe_importable)
        except Exception:  # a user's object may raise at any access
            packed = pack(value, f"model.arguments.{name}")
            plain[name] = packed.tree
            odd.append(name)
            notes += packed.notes
    return ModelArguments(plain, tuple(odd), tuple(notes))


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
    return nothing if described.odd else described


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
    if path is None or is_elsewhere(source):
        raise NotDescribableError
    if not source["file"] and PACKAGE_FOLDERS.isdisjoint(path.parts):  # Python's own: not imported for a dump
        raise NotDescribableError
    if not defines_code(path, name, own=not is_installed(path)):
        raise NotDescribableError
    return source


def advise_rebuild(
    model: nn.Module, source: Mapping[str, str], arguments: ModelArguments, *, built: bool
) -> Iterator[str]:
    """Yield what to change if a replay cannot import the model's code, or cannot build the model.

    The class is not called, since its constructor may change what the training uses: only its signature is compared
    with the arguments.
    """
    name = source["name"]
    is_nowhere = not source["file"] and source["module"] in ("__main__", "") and not is_typed(source)
    if "<" in name or is_nowhere:
        where = "inside a function" if "<" in name else "outside of any file"
        yield f"a replay cannot import {name}, which is defined {where}: define it at the top level of a .py file."
        return
    if not built and (problem := _find_problem(model, arguments)):
        yield (
            f"a replay cannot build {name} {problem}. Give Recorder arguments={{...}}, the plain data that {name} was "
            "called with, or builder=FUNCTION, a function at the top level of a file that takes no arguments and "
            "returns the model."
        )


def _find_problem(model: nn.Module, arguments: ModelArguments) -> str:
    """Return why the class cannot be called as a replay does, "" if its signature does not show it."""
    kind, plain = class_of(model), arguments.plain
    if arguments.odd:
        return f"from its arguments ({', '.join(sorted(map(str, arguments.odd)))}: not plain data)"
    called = f"as {kind.__name__}({', '.join(map(str, plain))})"
    if not plain and kind.__init__ in _CONTAINERS and next(model.children(), None) is not None:
        return f"{called}: it would be empty"
    refused = why_refused(kind, plain)
    return f"{called} ({refused})" if refused else ""


def why_refused(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return why the signature of a class or function refuses the arguments; "" if it shows no reason.

    The function is not called.
    """
    try:
        signature = inspect.signature(function)
    except Exception:  # it has no signature, or a user's own one
        return ""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return str(error)
    return ""


def advise_loss(source: Mapping[str, str]) -> Iterator[str]:
    """Yield what to change if a replay cannot import the loss."""
    is_elsewhere_in_file = is_elsewhere(source) and source["name"].isidentifier()
    if not (is_own_function(source) or is_elsewhere_in_file or is_typed(source)):
        name = source["name"].rpartition(".")[2] or source["name"]
        yield (
            f"a replay cannot import the loss ({name}), and cannot check gradients without it. Give Recorder a "
            "function at the top level of a file of this project: loss=loss_of, with def loss_of(output, batch): "
            "return ..."
        )
