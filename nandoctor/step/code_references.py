"""Decide which code a replay may run, and find the code that the user's own dump names.

Nothing is imported for a dump that this user's recorder did not sign. For the user's own dump, a Module class from an
installed package or the working directory is imported, and called with the recorded arguments; so is a function in the
working directory that built the training's model. The classes of configs among the arguments are imported by the same
rules. The source is checked for the definition before anything is imported.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.classify import is_extra_state
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Reference, approving_command, code_rows, is_transformers_config
from nandoctor.dumps.signature import Provenance
from nandoctor.dumps.trees import is_plain_data
from nandoctor.errors import ModelError, UnapprovedCodeError
from nandoctor.source_files import defines_code, find_typed, hash_of
from nandoctor.step.argument_objects import Source, find_standard, make_argument, make_config
from nandoctor.step.model_loading import ModelSource, build_model, find_attribute
from nandoctor.step.settings import Settings
from nandoctor.text import brief, plural, relative_path


def find_model(dump: Dump) -> Callable[[], nn.Module]:
    """Return the builder of the model that the user's own dump names, from the working directory or a package.

    Raises:
        ModelError: the dump names no model, the code is not found, or only the user may approve running it; then the
            message shows the command that names it.
    """
    reference = dump.recorded.model
    if reference is None or not reference.name:
        raise ModelError(
            "The dump does not say which class the model is of.",
            remedy="Next time define the class in a file, or give Recorder its builder. For this file, name the code:",
            options=("--model", "path/to/file.py:attr"),
        )
    if not is_plain_data(reference.arguments):
        raise _needs_approval(reference, dump, "its arguments are not plain data")
    found = _import_source(reference, dump)
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise _needs_approval(reference, dump, "it is not a Module class")

    @functools.wraps(found)
    def build(**more: Any) -> nn.Module:
        made: nn.Module = found(**{**_make_arguments(reference.arguments, dump), **more})
        return made

    build.__qualname__ = brief(reference.spec)
    return build


def _make_arguments(described: Mapping[str, Any], dump: Dump) -> dict[str, Any]:
    """Return the arguments with the objects among them, whose classes are found as the model's is."""

    def find(source: Source) -> Any:
        named: dict[str, Any] = {name: str(source.get(name, "")) for name in ("module", "name", "file", "sha256")}
        return find_standard(source) or _import_source(Reference(**named), dump)

    return {name: make_argument(value, find) for name, value in described.items()}


def fill_config(source: ModelSource, reference: Reference | None, directory: Path) -> Callable[[], nn.Module] | None:
    """Return the builder of the transformers model that the user named, with the dump's values for its configuration.

    None if the dump has no such values, or the user named something else.
    """
    if reference is None or reference.configuration is None:
        return None
    found = find_attribute(source, directory=directory)
    kind, described = getattr(found, "config_class", None), reference.arguments["config"]
    if not (isinstance(found, type) and is_transformers_config(kind)):
        return None
    return lambda: found(make_config(kind, described["config"], str(described.get("attention"))))


def find_loss(dump: Dump, files: Iterable[Path]) -> tuple[Callable[..., Any] | None, list[str]]:
    """Return the loss that the user's own dump names, found as the model is, and notes.

    Without a loss, return None and a note that says what to type, in which one of the `files` that the user named may
    be the loss's. A source edited since the training gets a note too.
    """
    reference = dump.recorded.loss_function
    if reference is None:
        return None, []
    command = f"to replay the backward pass, {_how_to_pass(reference, _file_named(reference, files))}"
    found, why = _import(reference, dump.provenance)
    if why:
        return None, [f"The loss that the file names was not run: {why}; {command}."]
    if isinstance(found, type) and not issubclass(found, nn.Module):
        return None, [f"{brief(reference.spec)} is not a function; {command}."]
    return build_loss(found), describe_code_change(reference)


def find_optimizer(dump: Dump, files: Iterable[Path]) -> type[torch.optim.Optimizer] | None:
    """Return the class of the optimizer that spoiled the weights, if its code may be run; else None.

    It may be if it is torch's, if it stands in one of the `files` that the user named, or if the dump is the user's
    own.
    """
    reference = dump.recorded.updater
    if reference is None:
        return None
    found = getattr(torch.optim, reference.name, None) if reference.module.startswith("torch.optim.") else None
    file = _file_named(reference, files)
    with suppress(ModelError):
        if file and hash_of(Path(file)) == reference.sha256:
            found = find_attribute(f"{file}:{reference.name}")
        elif found is None and dump.provenance.own:
            found = _import_source(reference, dump)
    return found if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) else None


def fill_optimizer(dump: Dump) -> Dump:
    """Return the user's own dump with the objects among the settings of its optimizer."""
    updater = dump.recorded.updater
    if updater is None or not dump.provenance.own:
        return dump
    make = functools.partial(_make_arguments, dump=dump)
    with suppress(Exception):  # the user's code may have changed; the update then raises
        updater = replace(updater, arguments=make(updater.arguments), groups=tuple(map(make, updater.groups)))
    return replace(dump, recorded=replace(dump.recorded, updater=updater))


def _file_named(reference: Reference, files: Iterable[Path]) -> str:
    """Return the reference's file among those that the user named, wherever it is now; "" if it is none of them."""
    parts = Path(reference.file).parts
    is_typed = not parts and reference.module == "__main__"  # into a notebook; since then saved to some file
    found = (file for file in files if parts and file.parts[-len(parts) :] == parts)
    typed = (file for file in files if is_typed and defines_code(file, reference.name, own=True, assigned=True))
    return next(map(relative_path, chain(found, typed)), "")


def build_loss(found: Any) -> Any:
    """Return the loss; if it is a Module class, an instance of it.

    Raises:
        ModelError: the class cannot be called without arguments.
    """
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        return found
    try:
        return build_model(found, {})
    except ModelError as error:
        raise ModelError(
            f"The loss is a class that needs arguments: {error.message}",
            remedy=f"Write loss_of = {found.__name__}(...) at the top level of a file, and add --loss FILE.py:loss_of.",
        ) from error


def _how_to_pass(reference: Reference, file: str) -> str:
    """Return what the user does to pass the loss, which is in that file, if it is not ""."""
    source = Path(file) if file else reference.source
    if reference.can_be_named and (source is None or defines_code(source, reference.name, own=True, assigned=True)):
        spec = f"{file}:{reference.name}" if file else reference.spec.replace("__main__:", "FILE.py:")
        return f"add --loss {shlex.quote(brief(spec))}"
    file = brief(file or reference.file or "FILE.py")
    spec = shlex.quote(f"{file}:loss_of")
    return f"write it as def loss_of(output, batch) at the top level of {file}, and add --loss {spec}"


def describe_code_change(reference: Reference | None) -> list[str]:
    """Return a note if the source differs from the training's, whose hash was recorded."""
    if reference is None or not reference.sha256:
        return []
    is_same = (source := reference.source) is None or hash_of(source) == reference.sha256
    return [] if is_same else [f"{brief(reference.file or reference.module)} has changed since the training."]


def _import_source(reference: Reference, dump: Dump) -> Any:
    """Import the referenced class or, from the project's own files, the top-level function that built the model."""
    found, why = _import(reference, dump.provenance)
    if why:
        raise _needs_approval(reference, dump, why)
    return found


def _import(reference: Reference, provenance: Provenance) -> tuple[Any, str]:
    """Return the class or function, and why it is not imported for this dump, "" if it is.

    Nothing is imported to find out.
    """
    if not provenance.own:
        return None, provenance.detail
    if not reference.file and reference.module == "__main__":
        typed = find_typed(reference.module, reference.name)
        elsewhere = "it was typed into a notebook or console, where nandoctor.replay(FILE) finds it"
        return typed, elsewhere if typed is None else ""
    source = reference.source
    if source is None and reference.can_be_named:
        elsewhere = f"{brief(reference.file)} is not in the working directory"
        return None, elsewhere if reference.file else "Python finds it in no installed package"
    if source is None or not defines_code(source, reference.name, own=bool(reference.file)):
        return None, "it is no class, nor a function at the top level of your own files"
    if reference.file and not provenance.here:
        return None, "this is not the folder that the dump was recorded in"
    spec, directory = (f"{source}:{reference.name}", Path()) if reference.file else (reference.spec, None)
    return find_attribute(spec, directory=directory), ""


def _needs_approval(reference: Reference, dump: Dump, why: str) -> ModelError:
    return ModelError(
        f"The dump names {brief(reference.spec)} as its model, and nandoctor does not import that by itself: {why}.",
        remedy="If you know that code, name it: " + approving_command(dump.path, dump.recorded, own=True),
    )


def require_approval(dump: Dump, settings: Settings) -> None:
    """Check that the code that the dump names is the user's own, or that the user named the model.

    Without approval of its loss, a replay still runs, but without the loss.

    Raises:
        UnapprovedCodeError: only the file names the model, and the file is not the user's own.
    """
    if dump.is_recorded and settings.model is None and not dump.provenance.own:
        rows = [f"  {label:<11} {text}" for label, text in code_rows(dump.recorded)]
        why = f"it was not recorded by you: {dump.provenance.detail}"
        raise UnapprovedCodeError(
            f"This dump asks to run code, and {why}. Nothing was run.\n\n" + "\n".join(rows),
            remedy=f"  To run it   {approving_command(dump.path, dump.recorded)}",
        )


def state_to_load(dump: Dump) -> tuple[Mapping[str, torch.Tensor], list[str]]:
    """Return the dump's weights for the model, and notes; without extra states if the dump is not the user's own.

    A module may do anything with its extra state, and some installed ones unpickle it.
    """
    extra = [name for name in dump.state if is_extra_state(name)]
    if dump.provenance.own or not extra:
        return dump.state, []
    note = (
        f"_extra_state ({plural(len(extra), 'module')}) was not handed to the model: the dump is not your recorder's."
    )
    return {name: tensor for name, tensor in dump.state.items() if name not in extra}, [note]
