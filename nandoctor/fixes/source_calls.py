"""A probability that a function is given by its only call, where its logit could be given as well."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import libcst as cst

from nandoctor.evidence.trace import OpCall
from nandoctor.fixes.source_definitions import Definitions
from nandoctor.fixes.source_expression import CannotWriteError, Expression, FileChange, calls_in, nodes_below, text_with
from nandoctor.fixes.source_tree import Replacement, SourceTree
from nandoctor.source_files import PACKAGE_FOLDERS

_MOST_PLACES = 2000
"""How many files and folders a name is looked for in; where there are more, it may be anywhere."""
_ALIKE = frozenset({"staticmethod", "torch.no_grad()", "torch.enable_grad()", "torch.compile"})
"""Decorators that hand over the arguments as they are."""
_LOOK_UPS = {"getattr": 1, "get_submodule": 0, "attrgetter": 0, "methodcaller": 0}
"""Functions that find something by its name, and the place of that among their arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenValue:
    """A parameter of a function, and the call that the only call of the function in its file gives for it."""

    function: cst.FunctionDef
    parameter: cst.Name
    value: cst.Call

    def taken_inside(
        self, tree: SourceTree, inner: cst.BaseExpression, name: str, replaced: Set[cst.CSTNode]
    ) -> Iterator[Replacement]:
        """Give the function what the value is computed of, by a `name`, and compute the value inside if it is read."""
        yield Replacement(node=self.value, text=tree.code(inner))
        yield Replacement(node=self.parameter, text=name)
        gone = {below for node in replaced for below in (node, *nodes_below(node))}
        body = self.function.body
        reads = (node for node in nodes_below(body) if isinstance(node, cst.Name) and node not in gone)
        first = next((node for node in reads if node.value == self.parameter.value), None)
        if first is not None:
            if tree.statement_of(first) not in body.body:
                raise CannotWriteError
            computed = f"{self.parameter.value} = {text_with(tree, self.value, {inner: name})}"
            yield Replacement(node=first, text=first.value, before=(computed,))


class GivenProbabilities:
    """The parameters of the functions of one file whose values can be taken inside."""

    def __init__(self, change: FileChange) -> None:
        self._tree, self._file, self._names = change.tree, change.file, change.names
        self._named: dict[cst.BaseExpression, tuple[GivenValue, str]] = {}
        self._only_calls: dict[cst.FunctionDef, cst.Call | None] = {}

    def value_of(self, parameter: cst.Name, ops: Sequence[OpCall]) -> tuple[cst.Call, OpCall] | None:
        """The sigmoid or softmax that a parameter is given, and its op; None for any other."""
        given = self._value_given(parameter)
        caller = self._tree.function_of(given.value) if given is not None else None
        if given is None or caller is None:
            return None
        op = dict(calls_in(self._tree, caller, ops)).get(given.value)
        if op is None or op.op not in ("sigmoid", "softmax"):
            return None
        expression = Expression(self._tree, given.value, op)
        dims = [text.removeprefix("dim=").removeprefix("-") for text in expression.texts_after_first()]
        is_alike = op.op == "sigmoid" or (dims and all(map(str.isdecimal, dims)))
        if not is_alike:
            return None
        inner = expression.argument_node("self")
        if inner not in self._named:
            self._named[inner] = given, ""
        return given.value, op

    def _value_given(self, parameter: cst.Name) -> GivenValue | None:
        """The call that is given for a parameter which is not bound anew; None where that is not certain."""
        function = self._tree.function_of(parameter)
        if function is None or Definitions(self._tree, function).binds(parameter.value):
            return None
        names = [item.name for item in function.params.params]
        own = next((name for name in names if name.value == parameter.value), None)
        call = self._only_call(function) if own is not None else None
        if own is None or call is None or any(arg.star for arg in call.args):
            return None
        by_name = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
        positional = (arg.value for arg in call.args if arg.keyword is None)
        by_place = dict(zip((name.value for name in names if name.value != "self"), positional, strict=False))
        value = (by_place | by_name).get(own.value)
        return GivenValue(function=function, parameter=own, value=value) if isinstance(value, cst.Call) else None

    def _only_call(self, function: cst.FunctionDef) -> cst.Call | None:
        """The only call of a function, None where there may be others; looked for once, in all files of the project."""
        if function not in self._only_calls:
            self._only_calls[function] = None
            with suppress(CannotWriteError):
                self._only_calls[function] = only_call(self._tree, function, self._file)
        return self._only_calls[function]

    def name_of(self, inner: cst.BaseExpression) -> str:
        """The name that the function is given the argument of such an op by."""
        if inner not in self._named:
            raise CannotWriteError
        given, name = self._named[inner]
        name = name or self._tree.free_name("logits", given.function.body, self._names)
        self._names.add(name)
        self._named[inner] = given, name
        return name

    def replacements(self, texts: Mapping[cst.CSTNode, str]) -> Iterator[Replacement]:
        """What is to be written for the names in new texts, each of which stands in the place of a node."""
        for inner, (given, name) in self._named.items():
            if name and any(name in text for text in texts.values()):
                yield from given.taken_inside(self._tree, inner, name, texts.keys())


def only_call(tree: SourceTree, function: cst.FunctionDef, file: Path) -> cst.Call:
    """The only call of a function, or of the module whose forward it is, that there can be.

    Nothing but the definition and the call has its name: no other file, and no text that it is looked up by.

    Raises:
        CannotWriteError: another call may be made, or the function is not called directly.
    """
    nodes = [*nodes_below(tree.module)]
    all_calls = [node for node in nodes if isinstance(node, cst.Call)]
    called, made = function.name.value, ""
    if called == "forward":
        made = next((node.name.value for node in tree.ancestors(function) if isinstance(node, cst.ClassDef)), "")
        called = _name_of_module(tree, [node for node in all_calls if _called(node) == made])
    calls = [node for node in all_calls if _called(node) == called]
    named = [node.value for node in nodes if isinstance(node, cst.Name)]
    is_alone = all(named.count(name) == 2 for name in (called, made) if name)
    decorators = {tree.code(item.decorator) for item in function.decorators}
    is_looked_up = any(_may_look_up(call, called) for call in all_calls)
    if not called or len(calls) != 1 or not is_alone or decorators - _ALIKE or is_looked_up:
        raise CannotWriteError
    if _is_elsewhere(file, rf"\b{made}\b|\.{called}\(" if made else rf"\b{called}\b"):
        raise CannotWriteError
    return calls[0]


def _may_look_up(call: cst.Call, name: str) -> bool:
    """Tell whether a call looks for what has a name by text: the text is this, or is computed."""
    place = _LOOK_UPS.get(_called(call), len(call.args))
    text = call.args[place].value if place < len(call.args) else None
    return text is not None and (not isinstance(text, cst.SimpleString) or name in str(text.evaluated_value))


def _is_elsewhere(file: Path, pattern: str) -> bool:
    """Tell whether another file of the project has what calls a function: it would have to change as well."""
    places = [*islice(_places_beside(file), _MOST_PLACES)]
    texts = (place.read_text(errors="ignore") for place in places if place != file and place.is_file())
    return len(places) == _MOST_PLACES or any(re.search(pattern, text) for text in texts)


def _places_beside(file: Path) -> Iterator[Path]:
    """Folders and files of code below the working directory, or where the outermost package of a file lies."""
    packages = [folder for folder in file.parents if (folder / "__init__.py").is_file()]
    here = Path.cwd()
    root = here if file.is_relative_to(here) else packages[-1].parent if packages else file.parent
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in PACKAGE_FOLDERS and not name.startswith(".")]
        yield Path(folder)
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _name_of_module(tree: SourceTree, made: Sequence[cst.Call]) -> str:
    """The name of the only attribute that has the module that a call makes; "" where there are more or others."""
    parent = next(tree.ancestors(made[0]), None) if len(made) == 1 else None
    target = parent.targets[0].target if isinstance(parent, cst.Assign) and len(parent.targets) == 1 else None
    return target.attr.value if isinstance(target, cst.Attribute) else ""


def _called(call: cst.Call) -> str:
    function = call.func
    named = function.attr if isinstance(function, cst.Attribute) else function
    return named.value if isinstance(named, cst.Name) else ""
