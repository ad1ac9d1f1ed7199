"""Find where a project's own code builds a model, to suggest options that build it in the same way.

Files are parsed as text; none of their code is run.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from nandoctor.dumps.classify import unwrapped_name
from nandoctor.dumps.recorded_format import as_option
from nandoctor.source_files import parse_source, shown_path
from nandoctor.step.scripts import flattened, runnable

_MAX_FILES = 200


Options = tuple[str, ...]
"""The options of a command that name the code which builds a model."""


def find_building(spec: Any, factory: Callable[..., Any]) -> Options:
    """Return how the project's own code builds what `factory` does, which a SPEC names; () if it does not show that."""
    location, _, name = spec.rpartition(":") if isinstance(spec, str) else ("", "", "")
    if not location.endswith(".py"):
        return ()
    try:
        parameters = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a factory made by C code has no signature
        return ()
    return _find_call(Path(location).resolve(), name, parameters)


def suggest_model(weights: Iterable[str], folder: Path) -> Options:
    """Return the options that build the first class in the folder's files that sets all attributes that weights need.

    Weights are named by the attributes of their model: `encoder.0.weight`.
    """
    needed = {unwrapped_name(name).partition(".")[0] for name in weights}
    for path in [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))][:_MAX_FILES]:
        tree = parse_source(path)
        for node in tree.body if tree is not None else ():
            attributes = (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
            stored = {inner.attr for inner in attributes if isinstance(inner.ctx, ast.Store)}
            if isinstance(node, ast.ClassDef) and needed <= stored:
                file = path.resolve()
                return _find_call(file, node.name, []) or ("--model", f"{shown_path(file)}:{node.name}")
    return ()


def _find_call(file: Path, name: str, parameters: Sequence[str]) -> Options:
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
    return ()


def _makers_of(name: str, tree: ast.Module) -> list[str]:
    """Return the functions that return what a call of `name` makes."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    returned = {it.name: [node for node in ast.walk(it) if isinstance(node, ast.Return)] for it in functions}
    return [maker for maker, statements in returned.items() if any(_calls_of(name, node) for node in statements)]


def _find_options(path: Path, tree: ast.Module, file: Path, name: str, parameters: Sequence[str]) -> Iterator[Options]:
    top = list(flattened(tree.body))
    statements = [*top, *(node for function, _ in runnable(top) for node in function.body)]
    known = set[str]()
    for statement in statements:
        match statement:
            case ast.Assign(targets=[target], value=value):
                for variable, made in _pairs(target, value):
                    known.add(variable)
                    if isinstance(made, ast.Call) and _calls_of(name, made):  # not a table of several
                        yield "--model", f"{shown_path(path)}:{variable}"
            case ast.ClassDef(name=target):
                known.add(target)
            case ast.ImportFrom(names=aliases):
                known |= {alias.asname or alias.name for alias in aliases}
    for call in _calls_of(name, tree):
        given = [*zip(parameters, call.args, strict=False), *((it.arg, it.value) for it in call.keywords)]
        texts = [(key, _text_of(value, path, known)) for key, value in given]
        if given and all(key and text for key, text in texts):
            arguments = [word for key, text in texts for word in ("--model-arg", f"{key}={text}")]
            yield "--model", f"{shown_path(file)}:{name}", *arguments


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables of an assignment with what is assigned to each: `G, D = Gen(64), Critic(64)`."""
    match target, value:
        case ast.Name(id=name), _:
            yield name, value
        case ast.Tuple(elts=targets), ast.Tuple(elts=values):
            for inner, made in zip(targets, values, strict=False):
                yield from _pairs(inner, made)


def _text_of(value: ast.expr, path: Path, known: Set[str]) -> str | None:
    """Return an argument as `--model-arg` takes it: a plain value, or the SPEC of what a file binds; else None."""
    match value:
        case ast.Name(id=name) if name in known:
            return f"{shown_path(path)}:{name}"
        case ast.Constant(value=constant):
            return as_option(constant)
    return None


def _calls_of(name: str, tree: ast.AST) -> list[ast.Call]:
    """Return the calls of `name` with arguments; one without shows nothing."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and (node.args or node.keywords))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]
