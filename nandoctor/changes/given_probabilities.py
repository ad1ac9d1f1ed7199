"""Computes a probability inside a function that is passed it, if the function is called from one place alone."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nandoctor.changes.definitions import Definitions, calls_in, nodes_in_body
from nandoctor.changes.editor import Editor
from nandoctor.changes.expression import Expression
from nandoctor.changes.source_tree import CannotWriteError, SourceTree, name_called
from nandoctor.evidence.trace import OpCall
from nandoctor.source_files import PACKAGE_FOLDERS

_MOST_PLACES = 2000
"""How many files and folders are searched for a name; if there are more, it may be anywhere."""
_TRANSPARENT_DECORATORS = frozenset({"staticmethod", "torch.no_grad()", "torch.enable_grad()", "torch.compile"})
"""Decorators that pass the arguments on unchanged."""
_LOOK_UPS = {"getattr": 1, "get_submodule": 0, "attrgetter": 0, "methodcaller": 0}
"""Functions that look something up by its name, and the position of the name among their arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenValue:
    """A parameter of a function, and the call expression that the function's only call passes for it."""

    function: ast.FunctionDef
    parameter: ast.arg
    value: ast.Call

    def take_inside(self, change: Editor, inner: ast.expr, name: str, replaced: Set[ast.AST]) -> None:
        """Pass the value's `inner` argument instead, by a `name`, and compute the value inside if it is still read."""
        change.replace(self.value, change.code(inner))
        change.replace(self.parameter, name)
        gone = {below for node in replaced for below in ast.walk(node)}
        body = nodes_in_body(self.function)
        reads = (node for node in body if isinstance(node, ast.Name) and node not in gone)
        first = next((node for node in reads if node.id == self.parameter.arg), None)
        if first is not None:
            if change.tree.statement_of(first) not in self.function.body:
                raise CannotWriteError
            computed = f"{self.parameter.arg} = {change.tree.code(self.value).replace(change.tree.code(inner), name)}"
            change.replace(first, first.id, (computed,))


class GivenProbabilities:
    """The parameters of one file's functions that are passed probabilities, which can be computed inside instead."""

    def __init__(self, change: Editor) -> None:
        self._change, self._tree = change, change.tree
        self._named: dict[ast.expr, tuple[GivenValue, str]] = {}
        self._only_calls: dict[ast.FunctionDef, ast.Call | None] = {}

    def value_of(self, parameter: ast.Name, ops: Sequence[OpCall]) -> tuple[ast.Call, OpCall] | None:
        """Return the sigmoid or softmax that is passed for a parameter, and its op; None for any other."""
        given = self._value_given(parameter)
        caller = self._tree.scope_of(given.value) if given is not None else None
        if given is None or not isinstance(caller, ast.FunctionDef):
            return None
        op = dict(calls_in(self._change, caller, ops)).get(given.value)
        if op is None or op.op not in ("sigmoid", "softmax"):
            return None
        expression = Expression(self._change, given.value, op)
        dims = [text.removeprefix("dim=").removeprefix("-") for text in expression.texts_after_first()]
        if op.op == "softmax" and not (dims and all(map(str.isdecimal, dims))):
            return None
        self._named.setdefault(expression.argument_node("self"), (given, ""))
        return given.value, op

    def _value_given(self, parameter: ast.Name) -> GivenValue | None:
        """Return the call that is passed for a parameter that is not rebound; None if that is not certain."""
        function = self._tree.scope_of(parameter)
        if not isinstance(function, ast.FunctionDef) or Definitions(self._tree, function).binds(parameter.id):
            return None
        names = function.args.args
        own = next((name for name in names if name.arg == parameter.id), None)
        call = self._only_call(function) if own is not None else None
        if own is None or call is None or any(isinstance(arg, ast.Starred) for arg in call.args):
            return None
        by_name = {item.arg: item.value for item in call.keywords if item.arg}
        by_place = dict(zip((name.arg for name in names if name.arg != "self"), call.args, strict=False))
        value = (by_place | by_name).get(own.arg)
        return GivenValue(function=function, parameter=own, value=value) if isinstance(value, ast.Call) else None

    def _only_call(self, function: ast.FunctionDef) -> ast.Call | None:
        """Return the only call of a function, None if there may be others; the project is searched once for each."""
        if function not in self._only_calls:
            self._only_calls[function] = None
            with suppress(CannotWriteError):
                self._only_calls[function] = only_call(self._tree, function, self._change.file)
        return self._only_calls[function]

    def name_of(self, inner: ast.expr) -> str:
        """Return the name by which the function gets the argument of such an op."""
        if inner not in self._named:
            raise CannotWriteError
        given, name = self._named[inner]
        name = name or self._change.new_name("logits", given.function.body[0])
        self._named[inner] = given, name
        return name

    def provide(self, texts: Mapping[ast.AST, str]) -> None:
        """Provide the names in the new texts, which are given by the nodes they replace."""
        for inner, (given, name) in self._named.items():
            if name and any(name in text for text in texts.values()):
                given.take_inside(self._change, inner, name, texts.keys())


def only_call(tree: SourceTree, function: ast.FunctionDef | ast.AsyncFunctionDef, file: Path) -> ast.Call:
    """Return the only possible call of a function, or of the module whose forward it is.

    Its name occurs only in the definition and the call: in no other file, and in no text that it is looked up by.

    Raises:
        CannotWriteError: another call may be made, or the function is not called directly.
    """
    nodes = [*ast.walk(tree.module)]
    all_calls = [node for node in nodes if isinstance(node, ast.Call)]
    called, made = function.name, ""
    if called == "forward":
        made = tree.class_around(function)
        called = _name_of_module(tree, [node for node in all_calls if name_called(node) == made])
    calls = [node for node in all_calls if name_called(node) == called]
    named = [item for node in nodes if not isinstance(node, ast.Constant) for item in vars(node).values()]
    is_alone = all(named.count(name) == 2 for name in (called, made) if name)
    decorators = {tree.code(item) for item in function.decorator_list}
    is_looked_up = any(_may_look_up(call, called) for call in all_calls)
    if not called or len(calls) != 1 or not is_alone or decorators - _TRANSPARENT_DECORATORS or is_looked_up:
        raise CannotWriteError
    if _is_elsewhere(file, rf"\b{made}\b|\.{called}\(" if made else rf"\b{called}\b"):
        raise CannotWriteError
    return calls[0]


def _may_look_up(call: ast.Call, name: str) -> bool:
    """Return True if a call may look up this name: by a text that contains it, or by a computed text."""
    place = _LOOK_UPS.get(name_called(call), len(call.args))
    text = call.args[place] if place < len(call.args) else None
    return text is not None and (not isinstance(text, ast.Constant) or name in str(text.value))


def _is_elsewhere(file: Path, pattern: str) -> bool:
    """Return True if another file of the project, or another cell, may call a function: it would have to change too."""
    if not file.is_file():
        return True
    places = [*islice(_places_beside(file), _MOST_PLACES)]
    texts = (place.read_text(errors="ignore") for place in places if place != file and place.is_file())
    return len(places) == _MOST_PLACES or any(re.search(pattern, text) for text in texts)


def _places_beside(file: Path) -> Iterator[Path]:
    """Yield folders and Python files below the working directory, or below the folder of the outermost package."""
    packages = [folder for folder in file.parents if (folder / "__init__.py").is_file()]
    here = Path.cwd()
    root = here if file.is_relative_to(here) else packages[-1].parent if packages else file.parent
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in PACKAGE_FOLDERS and not name.startswith(".")]
        yield Path(folder)
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _name_of_module(tree: SourceTree, made: Sequence[ast.Call]) -> str:
    """Return the attribute that the module's only construction is assigned to; "" if there is no such one."""
    parent = tree.parent(made[0]) if len(made) == 1 else None
    target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    return target.attr if isinstance(target, ast.Attribute) else ""
