"""Resolves a name at a place in a function: to its definition, if that is certain, or to its only call's argument."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path

import libcst as cst
from libcst.helpers import get_full_name_for_node

from nandoctor.evidence.trace import OpCall
from nandoctor.fixes.source_expression import CannotWriteError, Expression, FileChange, text_with
from nandoctor.fixes.source_tree import Replacement, SourceTree, name_called, names_in, nodes_in
from nandoctor.source_files import PACKAGE_FOLDERS

_COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)
_LOOPS = (cst.For, cst.While, *_COMPREHENSIONS)
_RUN_LATER = (cst.Lambda, cst.FunctionDef)
_SAME_MEMORY = ("data", "T", "mT")
_MOST_PLACES = 2000
"""How many files and folders are searched for a name; if there are more, it may be anywhere."""
_TRANSPARENT_DECORATORS = frozenset({"staticmethod", "torch.no_grad()", "torch.enable_grad()", "torch.compile"})
"""Decorators that pass the arguments on unchanged."""
_LOOK_UPS = {"getattr": 1, "get_submodule": 0, "attrgetter": 0, "methodcaller": 0}
"""Functions that look something up by its name, and the position of the name among their arguments."""
Position = tuple[int, int]


class Definitions:
    """The bindings of names in one function's body, and their places; parameters are not included."""

    def __init__(self, tree: SourceTree, function: cst.FunctionDef | cst.Lambda) -> None:
        self._tree, self._function = tree, function

    @cached_property
    def _bound(self) -> dict[str, list[tuple[Position, cst.CSTNode]]]:
        """By name, each binding's end and the node that makes it, in the order of the text."""
        found: dict[str, list[tuple[Position, cst.CSTNode]]] = {}
        for node in nodes_in(self._function.body):
            for name in _names_bound(node):
                found.setdefault(name, []).append((self._tree.end_of(node), node))
        return {name: sorted(places, key=lambda place: place[0]) for name, places in found.items()}

    def binds(self, name: str) -> bool:
        """Return True if the function's body binds a name, or writes into it; it may also be a parameter."""
        return name in self._bound

    def value_of(self, name: cst.Name) -> cst.BaseExpression | None:
        """Return the expression that a name stands for where it is read, None if that depends on the path taken."""
        if self._is_run_later(name):
            return None
        before = [(end, node) for end, node in self._bound.get(name.value, ()) if end <= self._tree.start_of(name)]
        node = before[-1][1] if before else None
        if not isinstance(node, cst.Assign) or len(node.targets) != 1 or not _name_of(node):
            return None
        blocks = (cst.IndentedBlock, cst.SimpleStatementSuite)
        block = next(parent for parent in self._tree.ancestors(node) if isinstance(parent, blocks))
        loops = self._loops_around(name, node)
        if block not in self._tree.ancestors(name) or any(self._binds_between(name.value, *loop) for loop in loops):
            return None
        return node.value

    def means_the_same(self, expression: cst.CSTNode, place: cst.CSTNode) -> bool:
        """Return True if the names in an expression stand for the same at a later place of the function."""
        if self._is_run_later(place):
            return False
        between = self._tree.end_of(expression), self._tree.start_of(place)
        spans = [between, *self._loops_around(place, expression)]
        return not any(self._binds_between(name, *span) for name in self._names_read(expression) for span in spans)

    def is_written_into(self, expression: cst.CSTNode) -> bool:
        """Return True if the function changes a tensor that an expression reads in place, anywhere."""
        places = (place for name in self._names_read(expression) for place in self._bound.get(name, ()))
        return any(not _only_binds(node) for _, node in places)

    def _names_read(self, expression: cst.CSTNode) -> set[str]:
        """Return the names in an expression, and the attributes: `self.scale` as well as `self`."""
        nodes = nodes_in(expression)
        attributes = {self._tree.code(node) for node in nodes if isinstance(node, cst.Attribute)}
        return names_in(expression) | attributes

    def _is_run_later(self, node: cst.CSTNode) -> bool:
        """Return True if a node is in a nested function, whose names are looked up when that is called."""
        inside = takewhile(lambda parent: parent is not self._function, self._tree.ancestors(node))
        return any(isinstance(parent, _RUN_LATER) for parent in inside)

    def _loops_around(self, node: cst.CSTNode, other: cst.CSTNode) -> list[tuple[Position, Position]]:
        """Return the start and end of each loop that is around a node but not around the other."""
        above = set(self._tree.ancestors(other))
        loops = (item for item in self._tree.ancestors(node) if isinstance(item, _LOOPS) and item not in above)
        return [(self._tree.start_of(loop), self._tree.end_of(loop)) for loop in loops]

    def _binds_between(self, name: str, start: Position, end: Position) -> bool:
        return any(start < where <= end for where, _ in self._bound.get(name, ()))

    def unread(
        self, candidates: Iterable[cst.Assign], replaced: Iterable[cst.CSTNode], still_read: Set[str]
    ) -> list[cst.Assign]:
        """Return the candidates that nothing reads once the `replaced` expressions are gone."""
        gone: set[cst.CSTNode] = {below for node in replaced for below in nodes_in(node)}
        left, found = list(candidates), list[cst.Assign]()
        while True:
            read = [
                node
                for node in nodes_in(self._function)
                if isinstance(node, cst.Name) and node not in gone and not self._is_target(node)
            ]
            more = [node for node in left if _name_of(node) not in still_read and not self._reads(node, read)]
            if not more:
                return found
            found += more
            left = [node for node in left if node not in more]
            gone.update(below for node in more for below in nodes_in(node))

    def _reads(self, assignment: cst.Assign, names: Iterable[cst.Name]) -> bool:
        """Return True if one of the names may refer to what an assignment binds."""
        same = (name for name in names if name.value == _name_of(assignment))
        return any(self.value_of(name) in (None, assignment.value) for name in same)

    def _is_target(self, node: cst.Name) -> bool:
        return isinstance(next(self._tree.ancestors(node), None), cst.AssignTarget)

    def is_no_read(self, node: cst.Name) -> bool:
        """Return True if a name is a target of an assignment, an attribute of something, or a keyword."""
        parent = next(self._tree.ancestors(node), None)
        is_part = isinstance(parent, cst.Attribute) and node is parent.attr
        return is_part or self._is_target(node) or (isinstance(parent, cst.Arg) and node is parent.keyword)


def calls_in(
    change: FileChange, function: cst.FunctionDef | cst.Lambda, ops: Sequence[OpCall]
) -> Iterator[tuple[cst.CSTNode, OpCall]]:
    """Yield the expressions of a function that called ops, each with its last op: autocast's casts come before it."""
    tree = change.tree
    first, last = tree.start_of(function)[0], tree.end_of(function)[0]
    places = {op.source: op for op in ops if op.source is not None and first <= op.source.line <= last}
    for source, op in places.items():
        node = change.find(source)
        if node is not None and tree.scope_of(node) is function:
            yield node, op


def in_loop(tree: SourceTree, node: cst.CSTNode) -> bool:
    """Return True if a node is inside a loop, in its function or around it."""
    return any(isinstance(parent, _LOOPS) for parent in tree.ancestors(node))


def _name_of(node: cst.Assign) -> str:
    target = node.targets[0].target
    return target.value if isinstance(target, cst.Name) else ""


def _names_bound(node: cst.CSTNode) -> Iterator[str]:
    """Yield the names that a node binds, deletes or writes into: `x`, `x[0]`, `x.add_(1)`, `relu(x, inplace=True)`."""
    targets: list[cst.CSTNode] = []
    if isinstance(node, cst.Assign):
        targets = [item.target for item in node.targets]
    elif isinstance(node, (cst.AnnAssign, cst.AugAssign, cst.For, cst.CompFor, cst.NamedExpr, cst.Del)):
        targets = [node.target]
    elif isinstance(node, (cst.AsName, cst.Param)):
        targets = [node.name]
    elif isinstance(node, cst.Call):
        targets = [*_written_by(node)]
    for target in targets:
        several = target.elements if isinstance(target, (cst.Tuple, cst.List)) else None
        yield from map(_base_name, [target] if several is None else [element.value for element in several])


def _written_by(call: cst.Call) -> Iterator[cst.CSTNode]:
    """Yield what a call changes in place, as far as its text shows."""
    name = name_called(call)
    keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
    inplace = keywords.get("inplace")
    is_named_so = name.endswith("_") and not name.endswith("__")
    if is_named_so or (isinstance(inplace, cst.Name) and inplace.value == "True"):
        yield from (call.func.value,) if isinstance(call.func, cst.Attribute) else ()
        yield from (arg.value for arg in call.args[:1])
    if "out" in keywords:
        yield keywords["out"]


def _only_binds(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Assign):
        return all(isinstance(item.target, (cst.Name, cst.Tuple, cst.List)) for item in node.targets)
    return not isinstance(node, (cst.AugAssign, cst.Call))


def _base_name(target: cst.CSTNode) -> str:
    """Return the `x` of `x`, `x[0]`, `x.data`, `x.view(-1)` and `*x`, or a dotted name; "" for anything else."""
    while True:
        if isinstance(target, cst.Call) and isinstance(target.func, cst.Attribute):
            target = target.func.value
        elif isinstance(target, (cst.Subscript, cst.StarredElement)) or (
            isinstance(target, cst.Attribute) and target.attr.value in _SAME_MEMORY
        ):
            target = target.value
        else:
            break
    return get_full_name_for_node(target) or "" if isinstance(target, (cst.Name, cst.Attribute)) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenValue:
    """A parameter of a function, and the call expression that the function's only call passes for it."""

    function: cst.FunctionDef
    parameter: cst.Name
    value: cst.Call

    def taken_inside(
        self, tree: SourceTree, inner: cst.BaseExpression, name: str, replaced: Set[cst.CSTNode]
    ) -> Iterator[Replacement]:
        """Pass the value's `inner` argument instead, by a `name`, and compute the value inside if it is still read."""
        yield Replacement(node=self.value, text=tree.code(inner))
        yield Replacement(node=self.parameter, text=name)
        gone = {below for node in replaced for below in nodes_in(node)}
        body = self.function.body
        reads = (node for node in nodes_in(body) if isinstance(node, cst.Name) and node not in gone)
        first = next((node for node in reads if node.value == self.parameter.value), None)
        if first is not None:
            if tree.statement_of(first) not in body.body:
                raise CannotWriteError
            computed = f"{self.parameter.value} = {text_with(tree, self.value, {inner: name})}"
            yield Replacement(node=first, text=first.value, before=(computed,))


class GivenProbabilities:
    """The parameters of one file's functions that are passed probabilities, which can be computed inside instead."""

    def __init__(self, change: FileChange) -> None:
        self._change, self._tree = change, change.tree
        self._named: dict[cst.BaseExpression, tuple[GivenValue, str]] = {}
        self._only_calls: dict[cst.FunctionDef, cst.Call | None] = {}

    def value_of(self, parameter: cst.Name, ops: Sequence[OpCall]) -> tuple[cst.Call, OpCall] | None:
        """Return the sigmoid or softmax that is passed for a parameter, and its op; None for any other."""
        given = self._value_given(parameter)
        caller = self._tree.scope_of(given.value) if given is not None else None
        if given is None or not isinstance(caller, cst.FunctionDef):
            return None
        op = dict(calls_in(self._change, caller, ops)).get(given.value)
        if op is None or op.op not in ("sigmoid", "softmax"):
            return None
        expression = Expression(self._tree, given.value, op)
        dims = [text.removeprefix("dim=").removeprefix("-") for text in expression.texts_after_first()]
        if op.op == "softmax" and not (dims and all(map(str.isdecimal, dims))):
            return None
        self._named.setdefault(expression.argument_node("self"), (given, ""))
        return given.value, op

    def _value_given(self, parameter: cst.Name) -> GivenValue | None:
        """Return the call that is passed for a parameter that is not rebound; None if that is not certain."""
        function = self._tree.scope_of(parameter)
        if not isinstance(function, cst.FunctionDef) or Definitions(self._tree, function).binds(parameter.value):
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
        """Return the only call of a function, None if there may be others; the project is searched once for each."""
        if function not in self._only_calls:
            self._only_calls[function] = None
            with suppress(CannotWriteError):
                self._only_calls[function] = only_call(self._tree, function, self._change.file)
        return self._only_calls[function]

    def name_of(self, inner: cst.BaseExpression) -> str:
        """Return the name by which the function gets the argument of such an op."""
        if inner not in self._named:
            raise CannotWriteError
        given, name = self._named[inner]
        name = name or self._change.new_name("logits", given.function.body)
        self._named[inner] = given, name
        return name

    def replacements(self, texts: Mapping[cst.CSTNode, str]) -> Iterator[Replacement]:
        """Yield the replacements that provide the names in the new texts, which are given by the nodes they replace."""
        for inner, (given, name) in self._named.items():
            if name and any(name in text for text in texts.values()):
                yield from given.taken_inside(self._tree, inner, name, texts.keys())


def only_call(tree: SourceTree, function: cst.FunctionDef, file: Path) -> cst.Call:
    """Return the only possible call of a function, or of the module whose forward it is.

    Its name occurs only in the definition and the call: in no other file, and in no text that it is looked up by.

    Raises:
        CannotWriteError: another call may be made, or the function is not called directly.
    """
    nodes = [*nodes_in(tree.module)]
    all_calls = [node for node in nodes if isinstance(node, cst.Call)]
    called, made = function.name.value, ""
    if called == "forward":
        made = tree.class_around(function)
        called = _name_of_module(tree, [node for node in all_calls if name_called(node) == made])
    calls = [node for node in all_calls if name_called(node) == called]
    named = [node.value for node in nodes if isinstance(node, cst.Name)]
    is_alone = all(named.count(name) == 2 for name in (called, made) if name)
    decorators = {tree.code(item.decorator) for item in function.decorators}
    is_looked_up = any(_may_look_up(call, called) for call in all_calls)
    if not called or len(calls) != 1 or not is_alone or decorators - _TRANSPARENT_DECORATORS or is_looked_up:
        raise CannotWriteError
    if _is_elsewhere(file, rf"\b{made}\b|\.{called}\(" if made else rf"\b{called}\b"):
        raise CannotWriteError
    return calls[0]


def _may_look_up(call: cst.Call, name: str) -> bool:
    """Return True if a call may look up this name: by a text that contains it, or by a computed text."""
    place = _LOOK_UPS.get(name_called(call), len(call.args))
    text = call.args[place].value if place < len(call.args) else None
    return text is not None and (not isinstance(text, cst.SimpleString) or name in str(text.evaluated_value))


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


def _name_of_module(tree: SourceTree, made: Sequence[cst.Call]) -> str:
    """Return the attribute that the module's only construction is assigned to; "" if there is no such one."""
    parent = next(tree.ancestors(made[0]), None) if len(made) == 1 else None
    target = parent.targets[0].target if isinstance(parent, cst.Assign) and len(parent.targets) == 1 else None
    return target.attr.value if isinstance(target, cst.Attribute) else ""
