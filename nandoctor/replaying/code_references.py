"""Finds the code that a dump names, and imports it only where that is no risk the file could make up.

In: a `Reference` from a file that nobody vouches for. Out: what makes the model, or an error with the command to type.

A Module class of an installed package or of the working directory is imported, and called with plain data alone. Where
the class is defined is read off the source before anything is imported; nothing else that a file names is run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from nandoctor.dumps.recorded_format import Reference
from nandoctor.dumps.text import printable
from nandoctor.errors import ModelError
from nandoctor.replaying.model_loading import find_attribute

_PLAIN = (bool, int, float, complex, str, type(None))


def find_model(reference: Reference | None, dump: Path) -> Callable[[], nn.Module]:
    """What builds the model that a dump names, from the working directory and the installed packages.

    Raises:
        ModelError: the dump names none, it is not to be found, or importing or calling it is the user's decision.
    """
    if reference is None or not reference.name:
        raise _unknown("The dump does not say which class the model is of.", dump)
    if not _is_plain(reference.arguments):
        raise _undecided(reference, dump, "its arguments are no plain data")
    found = _import_class(reference, reference.spec, reference.file, dump)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise _undecided(reference, dump, "it is no Module class")

    @functools.wraps(found)
    def build(**more: Any) -> nn.Module:
        if reference.config:
            return _build_from_config(found, reference, dump)
        return found(**{**reference.arguments, **more})

    build.__qualname__ = printable(reference.spec)
    return build


def find_loss(reference: Reference | None) -> tuple[Callable[..., Any] | None, list[str]]:
    """The loss function that a dump names, if it is of the working directory and its source is that of the training.

    A function can do anything; one whose source has the hash in the file is the one that the training ran. Else None,
    and a note that says what to type.
    """
    if reference is None:
        return None, []
    path = Path.cwd() / reference.file
    within = reference.file and path.resolve().is_relative_to(Path.cwd()) and path.is_file()
    command = f"to replay the backward pass, add --loss {shlex.quote(printable(reference.spec))}"
    if not within or not reference.name.isidentifier():
        return None, [f"The loss function is not in the working directory; {command}."]
    if hash_of(path) != reference.sha256:
        return None, [f"{printable(reference.file)} has changed since the training, and holds the loss; {command}."]
    directory, spec = _from_file(reference, path.resolve())
    return find_attribute(spec, directory=directory), []


def describe_change(reference: Reference | None, model: nn.Module) -> list[str]:
    """Notes on what is not as it was: the source of the model, and the model itself as Python prints it."""
    if reference is None:
        return []
    notes = []
    path = Path.cwd() / reference.file
    if reference.file and reference.sha256 and path.is_file() and hash_of(path) != reference.sha256:
        notes.append(f"{printable(reference.file)} has changed since the training, by its sha256.")
    pairs = zip(reference.structure.splitlines(), str(model).splitlines(), strict=False)
    lines = next(((was.strip(), now.strip()) for was, now in pairs if was != now), None)
    if reference.structure and lines:
        notes.append(f"The model is not built as it was in the training: {printable(lines[0])} is now {lines[1]}.")
    return notes


def hash_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _import_class(reference: Reference, spec: str, file: str, dump: Path) -> Any:
    name = reference.name if spec == reference.spec else spec.rpartition(":")[2]
    path = (Path.cwd() / file).resolve() if file else _installed_source(spec.partition(":")[0])
    if path is None or not path.is_file() or (file and not path.is_relative_to(Path.cwd())):
        where = f"{printable(file)} is not in the working directory" if file else "no installed package has it"
        raise _undecided(reference, dump, where)
    if not _defines_class(path, name):
        raise _undecided(reference, dump, f"{path.name} defines no class of that name")
    directory, local_spec = _from_file(reference, path) if file else (None, spec)
    return find_attribute(local_spec, directory=directory)


def _from_file(reference: Reference, path: Path) -> tuple[Path, str]:
    """The folder to import from and the SPEC: a module keeps its dotted name, for its relative imports need it."""
    parts = reference.module.split(".")
    stem = list(path.with_suffix("").parts)
    stem = stem[:-1] if stem[-1] == "__init__" else stem
    if reference.module != "__main__" and stem[-len(parts) :] == parts:
        return Path(*stem[: -len(parts)]), f"{reference.module}:{reference.name}"
    return path.parent, f"{path.name}:{reference.name}"


def _installed_source(module: str) -> Path | None:
    """The source of a module of an installed distribution, found without importing its packages."""
    top, *parts = module.split(".")
    if top not in importlib.metadata.packages_distributions() or not all(p.isidentifier() for p in [top, *parts]):
        return None
    elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() != Path.cwd()]
    found = importlib.machinery.PathFinder.find_spec(top, elsewhere)
    if found is None or found.origin is None:
        return None
    if not parts:
        return Path(found.origin)
    base = Path(found.origin).parent.joinpath(*parts)
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def _defines_class(path: Path, name: str) -> bool:
    try:
        body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError, OSError, ValueError):
        return False
    for part in name.split("."):
        definition = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == part), None)
        if definition is None:
            return False
        body = definition.body
    return True


def _build_from_config(model: type[nn.Module], reference: Reference, dump: Path) -> nn.Module:
    """A model of transformers: its configuration is a class of an installed package, too, made of plain data."""
    kind = _import_class(reference, reference.config, "", dump)
    if not any(base.__name__.lower() == "pretrainedconfig" for base in getattr(kind, "__mro__", ())):
        raise _undecided(reference, dump, f"{printable(reference.config)} is no configuration")
    config = kind.from_dict(dict(reference.arguments["config"]))
    if reference.attention:
        config._attn_implementation = reference.attention
    return model(config)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def _undecided(reference: Reference, dump: Path, why: str) -> ModelError:
    spec = printable(reference.spec)
    words = ["nandoctor", "replay", str(dump), "--model", spec]
    for name, value in reference.arguments.items() if not reference.config else ():
        words += ["--model-arg", printable(f"{name}={value if isinstance(value, str) else repr(value)}")]
    return ModelError(
        f"The dump names {spec} as its model, and nandoctor does not import that by itself: {why}.",
        remedy=f"If you know that code, run where it is: {shlex.join(words)}",
    )


def _unknown(message: str, dump: Path) -> ModelError:
    return ModelError(
        message,
        remedy=f"Name the code: nandoctor replay {shlex.quote(str(dump))} --model path/to/file.py:attr; next time "
        "define the class in a file, or give Recorder its builder.",
    )
