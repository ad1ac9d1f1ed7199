"""Find where a project's own code builds a model, to suggest options that build it in the same way.

Files are parsed as text; none of their code is run.
"""

from __future__ import annotations

import ast
import inspect
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nandoctor.dumps.classify import unwrapped_name
from nandoctor.source_files import parse_source, shown_path
from nandoctor.step.scripts import flattened, runnable

_MAX_FILES = 200


def remedy_for_arguments(spec: str, factory: Callable[..., Any], otherwise: str) -> str:
    """Return what to type if `factory`, which a SPEC names, was called in another way than by the project's own code.

    Return `otherwise` if that does not show how it is called.
    """
    location, _, name = spec.rpartition(":")
    if not location.endswith(".py"):
        return otherwise
    try:
        parameters = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a factory made by C code has no signature
        return otherwise
    options = _find_call(Path(location).resolve(), name, parameters)
    return otherwise if options is None else f"Build it as your own code does: {options}"


def suggest_model(weights: Iterable[str], folder: Path) -> str | None:
    """Return the options that build the first class in the folder's files that sets all attributes that weights need.

    Weights are named by the attributes of their model: `encoder.0.weight`.
    """
    needed = {unwrapped_name(name).partition(".")[0] for name in weights}
    for path in [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))][:_MAX_FILES]:
        tree = parse_source(path)
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ClassDef) and needed <= set(_attributes_set(node)):
                file = path.resolve()
                return _find_call(file, node.name, []) or f"--model {shlex.quote(f'{shown_path(file)}:{node.name}')}"
    return None


def _attributes_set(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of the attributes that a class sets on `self`."""
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _find_call(file: Path, name: str, parameters: Sequence[str]) -> str | None:
    """Return the options that build `name` of a file as a call in that file does, or else in a file beside it.

    If the only calls are in functions that return what they make, return how the first of these is called.
    """
    paths = [file, *sorted(path for path in file.parent.glob("*.py") if path != file)[:_MAX_FILES]]
    trees = [(path, tree) for path in paths if (tree := parse_source(path)) is not None]
    names = [name]
    for made in names:
        for path, tree in trees:
            for options in _find_options(path, tree, file, made, parameters if made == name else ()):
                return options
        names += [maker for _, tree in trees for maker in _makers_of(made, tree) if maker not in names]
    return None


def _makers_of(name: str, tree: ast.Module) -> list[str]:
    """Return the functions that return what a call of `name` makes."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    returned = {it.name: [node for node in ast.walk(it) if isinstance(node, ast.Return)] for it in functions}
    return [maker for maker, statements in returned.items() if any(_calls_of(name, node) for node in statements)]


def _find_options(path: Path, tree: ast.Module, file: Path, name: str, parameters: Sequence[str]) -> Iterator[str]:
    top = list(flattened(tree.body))
    statements = [*top, *(node for function, _ in runnable(top) for node in function.body)]
    known = set[str]()
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)]):
                known.add(target)
                if _calls_of(name, statement):
                    yield f"--model {shlex.quote(f'{shown_path(path)}:{target}')}"
            case ast.ClassDef(name=target):
                known.add(target)
            case ast.ImportFrom(names=aliases):
                known |= {alias.asname or alias.name for alias in aliases}
    for call in _calls_of(name, tree):
        given = [*zip(parameters, call.args, strict=False), *((it.arg, it.value) for it in call.keywords)]
        values = [(key, value.id) for key, value in given if key and isinstance(value, ast.Name)]
        if given and len(values) == len(given) and all(value in known for _, value in values):
            arguments = (shlex.quote(f"{key}={shown_path(path)}:{value}") for key, value in values)
            model = shlex.quote(f"{shown_path(file)}:{name}")
            yield " ".join([f"--model {model}", *(f"--model-arg {text}" for text in arguments)])


def _calls_of(name: str, tree: ast.AST) -> list[ast.Call]:
    """Return the calls of `name` with arguments; one without shows nothing."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and (node.args or node.keywords))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]
