"""Describes the code that a recorded dump asks a replay to run, and the command that allows it.

Nothing is imported for this.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nandoctor.dumps.recorded_format import Recorded, Reference
from nandoctor.dumps.trees import KIND, holds_objects, is_plain_data
from nandoctor.source_files import ASSIGNED, defines, hash_of
from nandoctor.text import brief, printable

_MAX_SHOWN = 20
_MAX_OPTION = 2000  # characters of one argument in the command


def code_rows(recorded: Recorded) -> Iterator[tuple[str, str]]:
    """Yield what a replay would import and call, and whether it is here, as pairs of a label and a text."""
    model, loss = recorded.model, recorded.loss_function
    if model is not None and model.name:
        yield "model", f"{brief(model.spec)} ({_whereabouts(model)})"
        if model.configuration:
            yield "config", f"{brief(model.configuration.spec)}, filled with the values in the file"
        elif model.arguments:
            shown = [brief(f"{name}={_shown(value)}") for name, value in list(model.arguments.items())[:_MAX_SHOWN]]
            more = f" and {len(model.arguments) - _MAX_SHOWN} more" if len(model.arguments) > _MAX_SHOWN else ""
            yield "arguments", (", ".join(shown) + more)
    times = f", {len(recorded.calls)} calls" if len(recorded.calls) > 1 else ""
    yield "method", f"{brief(recorded.method or 'forward')}{times}"
    if loss is not None:
        yield "loss", f"{brief(loss.spec)} ({_whereabouts(loss)})"
    elif recorded.loss_field is not None:
        part = f"{brief(recorded.loss_field)} of " if recorded.loss_field else ""
        yield "loss", f"{part}what the model returns"


def approving_command(dump: Path, recorded: Recorded, *, own: bool = False) -> str:
    """Return the `nandoctor replay` command, quoted for a shell, that names all of this code by flags.

    If the dump is the user's `own`, it may name files that are not in this folder.
    """
    path = str(dump)
    words = ["nandoctor", "replay", f"./{path}" if path.startswith("-") else path]
    model, loss = recorded.model or Reference(), recorded.loss_function
    needs_function = holds_objects(model.arguments) and model.configuration is None
    is_typable = _may_be_offered(model, own=own) and not needs_function
    named = model.spec if is_typable else "FILE.py:NAME"
    words += ["--model", named.replace("__main__:", "FILE.py:")]  # a notebook's code, once it is saved to a file
    if not holds_objects(model.arguments):  # else a function has to make them, or the model fills its configuration
        typed = ((name, as_option(value)) for name, value in model.arguments.items() if str(name).isidentifier())
        words += [word for name, text in typed if text is not None for word in ("--model-arg", f"{name}={text}")]
    if loss is not None and _may_be_offered(loss, own=own, assigned=True):
        words += ["--loss", loss.spec.replace("__main__:", "FILE.py:")]
    return shlex.join(map(printable, words))  # no terminal should get the rest of a path as it is


def _may_be_offered(reference: Reference, *, own: bool, assigned: bool = False) -> bool:
    """Return True if the command may name it: its file, or an installed package, defines it, and does not import it.

    Python's own functions, which a file may import, are not models, and some start programs (`train.py:os.system`). A
    notebook's code has no file yet. With `assigned`, an assignment defines it too.
    """
    if not reference.can_be_named or _is_pythons(reference) or "__" in {part[:2] for part in reference.name.split(".")}:
        return False
    if not reference.file and reference.module in ("", "__main__"):
        return True
    kinds = (ast.ClassDef, ast.FunctionDef, *(ASSIGNED if assigned else ())) if reference.file else (ast.ClassDef,)
    return own if (path := reference.source) is None else defines(path, reference.name, kinds)


def _is_pythons(reference: Reference) -> bool:
    return not reference.file and reference.module.partition(".")[0] in sys.stdlib_module_names


def _whereabouts(reference: Reference) -> str:
    if _is_pythons(reference):
        return "a part of Python, which has no models or losses: do not run it"
    if not reference.file:
        return "an installed package" if reference.module not in ("", "__main__") else "typed into a console"
    path = reference.source
    if path is None:
        return "not a file in this folder"
    if not reference.sha256:
        return "in this folder; its sha256 was not recorded"
    same = hash_of(path) == reference.sha256
    return f"in this folder; {'sha256 as recorded' if same else 'changed since it was recorded'}"


def _shown(value: Any) -> str:
    text = as_option(value)
    kind = value.get(KIND) if isinstance(value, Mapping) else None
    if isinstance(kind, Mapping):
        return f"an object of {kind.get('name', '')}"
    return text if text is not None else f"a {type(value).__name__} that only a function can build"


def is_transformers_config(kind: Any) -> bool:
    """Return True for a configuration class of transformers, which spells its base class in two ways."""
    return any(base.__name__.lower() == "pretrainedconfig" for base in getattr(kind, "__mro__", ()))


def as_option(value: Any) -> str | None:
    """Return the value as `--model-arg` reads it back, a Python literal or another string; None for train.py:CFG."""
    if not is_plain_data(value) or holds_objects(value) or (isinstance(value, str) and ".py:" in value):
        return None
    text = value if isinstance(value, str) else repr(value)
    is_typable = len(text) <= _MAX_OPTION and text.isprintable()
    return text if is_typable and read_option(text) == value else None


def read_option(text: str) -> Any:
    """Return the value after `--model-arg K=`: a Python literal if it reads as one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # TypeError: an unhashable key
        return text
