"""Find where a project's own code builds a model, to suggest options that build it in the same way.

Files are parsed as text; none of their code is run.
"""

from __future__ import annotations

import ast
import inspect
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nandoctor.source_files import parse_source, shown_path
from nandoctor.step.scripts import flattened

_MAX_FILES = 200


def remedy_for_arguments(spec: str, factory: Callable[..., Any] | None) -> str:
    """Return what to type if a SPEC was not built: what the project's own code gives, if `factory` lacks arguments."""
    location, _, name = spec.rpartition(":")
    if factory is not None and location.endswith(".py"):
        with suppress(TypeError, ValueError):  # a factory made by C code has no signature
            parameters = list(inspect.signature(factory).parameters)
            if options := suggest_options(Path(location).resolve(), name, parameters):
                return f"Build it as your own code does: {options}"
    return (
        "Give the arguments it needs with --model-arg K=V, once for each; V may be an object, as in "
        "cfg=train.py:CFG. Relative paths start in the working directory."
    )


def suggest_options(file: Path, name: str, parameters: Sequence[str]) -> str:
    """Return the options that build `name` of a file as a call of it does, "" if no call shows them.

    Calls in the file itself come first, then those in the files beside it.
    """
    beside = sorted(path for path in file.parent.glob("*.py") if path != file)[:_MAX_FILES]
    found = (options for path in (file, *beside) for options in _find_options(path, file, name, parameters))
    return next(found, "")


def _find_options(path: Path, file: Path, name: str, parameters: Sequence[str]) -> Iterator[str]:
    tree = parse_source(path)
    body = list(flattened(tree.body)) if tree is not None else []
    known = {node.id for top in body for node in _outside_functions(top) if isinstance(node, ast.Name)}
    known |= {top.name for top in body if isinstance(top, ast.ClassDef)}
    known |= {alias.asname or alias.name for top in body if isinstance(top, ast.ImportFrom) for alias in top.names}
    for top in body:
        calls = [node for node in ast.walk(top) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name]
        if calls and isinstance(top, ast.Assign) and isinstance(top.targets[0], ast.Name):
            yield f"--model {shlex.quote(f'{shown_path(path)}:{top.targets[0].id}')}"
        for call in calls:
            given = [*zip(parameters, call.args, strict=False), *((it.arg, it.value) for it in call.keywords)]
            values = [(key, value.id) for key, value in given if key and isinstance(value, ast.Name)]
            if given and len(values) == len(given) and all(value in known for _, value in values):
                arguments = (shlex.quote(f"{key}={shown_path(path)}:{value}") for key, value in values)
                model = shlex.quote(f"{shown_path(file)}:{name}")
                yield " ".join([f"--model {model}", *(f"--model-arg {text}" for text in arguments)])


def _outside_functions(statement: ast.stmt) -> Iterator[ast.AST]:
    is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    yield from () if is_definition else ast.walk(statement)
