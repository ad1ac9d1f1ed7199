"""Resolves a name at a place in a function: to its definition, if that is certain, or to its only call's argument."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path

from nandoctor.changes.editor import Editor
from nandoctor.changes.expression import Expression
from nandoctor.changes.source_tree import COMPREHENSIONS, FUNCTIONS, CannotWriteError, SourceTree, name_called, names_in
from nandoctor.evidence.trace import OpCall
from nandoctor.source_files import PACKAGE_FOLDERS

_LOOPS = (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)
_RUN_LATER = (ast.Lambda, *FUNCTIONS)
_SAME_MEMORY = ("data", "T", "mT")
_MOST_PLACES = 2000
"""How many files and folders are searched for a name; if there are more, it may be anywhere."""
_TRANSPARENT_DECORATORS = frozenset({"staticmethod", "torch.no_grad()", "torch.enable_grad()", "torch.compile"})
"""Decorators that pass the arguments on unchanged."""
_LOOK_UPS = {"getattr": 1, "get_submodule": 0, "attrgetter": 0, "methodcaller": 0}
"""Functions that look something up by its name, and the position of the name among their arguments."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Definitions:
    """The bindings of names in one function's body, and their places; parameters are not included."""

    def __init__(self, tree: SourceTree, function: Function) -> None:
        self._tree, self._function = tree, function

    @cached_property
    def _bound(self) -> dict[str, list[tuple[int, ast.AST]]]:
        """By name, each binding's end and the node that makes it, in the order of the text."""
        found: dict[str, list[tuple[int, ast.AST]]] = {}
        for node in nodes_in_body(self._function):
            for name, place in _names_bound(node):
                found.setdefault(name, []).append((self._tree.span(place)[1], node))
        return {name: sorted(places, key=lambda place: place[0]) for name, places in found.items()}

    def binds(self, name: str) -> bool:
        """Return True if the function's body binds a name, or writes into it; it may also be a parameter."""
        return name in self._bound

    def value_of(self, name: ast.Name) -> ast.expr | None:
        """Return the expression that a name stands for where it is read, None if that depends on the path taken."""
        if self._is_run_later(name):
            return None
        before = [(end, node) for end, node in self._bound.get(name.id, ()) if end <= self._tree.span(name)[0]]
        node = before[-1][1] if before else None
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not _name_of(node):
            return None
        block, loops = self._tree.block_of(node), self._loops_around(name, node)
        is_in_block = any(parent in block for parent in self._tree.ancestors(name))
        if not is_in_block or any(self._binds_between(name.id, *loop) for loop in loops):
            return None
        return node.value

    def means_the_same(self, expression: ast.AST, place: ast.AST) -> bool:
        """Return True if the names in an expression stand for the same at a later place of the function."""
        if self._is_run_later(place):
            return False
        between = self._tree.span(expression)[1], self._tree.span(place)[0]
        spans = [between, *self._loops_around(place, expression)]
        return not any(self._binds_between(name, *span) for name in self._names_read(expression) for span in spans)

    def is_written_into(self, expression: ast.AST) -> bool:
        """Return True if the function changes a tensor that an expression reads in place, anywhere."""
        places = (place for name in self._names_read(expression) for place in self._bound.get(name, ()))
        return any(not _only_binds(node) for _, node in places)

    def _names_read(self, expression: ast.AST) -> set[str]:
        """Return the names in an expression, and the attributes: `self.scale` as well as `self`."""
        attributes = {self._tree.code(node) for node in ast.walk(expression) if isinstance(node, ast.Attribute)}
        return names_in(expression) | attributes

    def _is_run_later(self, node: ast.AST) -> bool:
        """Return True if a node is in a nested function, whose names are looked up when that is called."""
        inside = takewhile(lambda parent: parent is not self._function, self._tree.ancestors(node))
        return any(isinstance(parent, _RUN_LATER) for parent in inside)

    def _loops_around(self, node: ast.AST, other: ast.AST) -> list[tuple[int, int]]:
        """Return the start and end of each loop that is around a node but not around the other."""
        above = set(self._tree.ancestors(other))
        loops = (item for item in self._tree.ancestors(node) if isinstance(item, _LOOPS) and item not in above)
        return [self._tree.span(loop) for loop in loops]

    def _binds_between(self, name: str, start: int, end: int) -> bool:
        return any(start < where <= end for where, _ in self._bound.get(name, ()))

    def unread(
        self, candidates: Iterable[ast.Assign], replaced: Iterable[ast.AST], still_read: Set[str]
    ) -> list[ast.Assign]:
        """Return the candidates that nothing reads once the `replaced` expressions are gone."""
        gone: set[ast.AST] = {below for node in replaced for below in ast.walk(node)}
        left, found = list(candidates), list[ast.Assign]()
        while True:
            read = [
                node
                for node in ast.walk(self._function)
                if isinstance(node, ast.Name) and node not in gone and not self.is_target(node)
            ]
            more = [node for node in left if _name_of(node) not in still_read and not self._reads(node, read)]
            if not more:
                return found
            found += more
            left = [node for node in left if node not in more]
            gone.update(below for node in more for below in ast.walk(node))

    def _reads(self, assignment: ast.Assign, names: Iterable[ast.Name]) -> bool:
        """Return True if one of the names may refer to what an assignment binds."""
        same = (name for name in names if name.id == _name_of(assignment))
        return any(self.value_of(name) in (None, assignment.value) for name in same)

    def is_target(self, node: ast.AST) -> bool:
        """Return True if a name is a target of an assignment."""
        parent = self._tree.parent(node)
        return isinstance(parent, ast.Assign) and node is not parent.value


def nodes_in_body(function: Function) -> Iterator[ast.AST]:
    """Yield every node below the body of a function."""
    for item in function.body if isinstance(function.body, list) else [function.body]:
        yield from ast.walk(item)


def calls_in(change: Editor, function: Function, ops: Sequence[OpCall]) -> Iterator[tuple[ast.AST, OpCall]]:
    """Yield the expressions of a function that called ops, each with its last op: autocast's casts come before it."""
    tree = change.tree
    first, last = function.lineno, function.end_lineno or function.lineno
    places = {op.source: op for op in ops if op.source is not None and first <= op.source.line <= last}
    for source, op in places.items():
        node = change.find(source)
        if node is not None and tree.scope_of(node) is function:
            yield node, op


def in_loop(tree: SourceTree, node: ast.AST) -> bool:
    """Return True if a node is inside a loop, in its function or around it."""
    return any(isinstance(parent, _LOOPS) for parent in tree.ancestors(node))


def _name_of(node: ast.Assign) -> str:
    target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _names_bound(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a node binds, deletes or writes into, and its place: `x`, `x[0]`, `x.add_(1)`."""
    place, targets = node, list[ast.AST]()
    if isinstance(node, ast.Assign | ast.Delete):
        targets = [*node.targets]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor | ast.NamedExpr):
        targets = [node.target]
    elif isinstance(node, ast.comprehension):
        place, targets = node.target, [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        place, targets = node.optional_vars, [node.optional_vars]
    elif isinstance(node, ast.alias | ast.ExceptHandler | ast.arg):
        yield str(getattr(node, "arg", "") or getattr(node, "asname", "") or getattr(node, "name", "")), place
    elif isinstance(node, ast.Call):
        targets = [*_written_by(node)]
    for target in targets:
        several = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        yield from ((_base_name(item), place) for item in several)


def _written_by(call: ast.Call) -> Iterator[ast.AST]:
    """Yield what a call changes in place, as far as its text shows."""
    name = name_called(call)
    keywords = {item.arg: item.value for item in call.keywords}
    inplace = keywords.get("inplace")
    is_named_so = name.endswith("_") and not name.endswith("__")
    if is_named_so or (isinstance(inplace, ast.Constant) and inplace.value is True):
        yield from (call.func.value,) if isinstance(call.func, ast.Attribute) else ()
        yield from call.args[:1]
    if "out" in keywords:
        yield keywords["out"]


def _only_binds(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name | ast.Tuple | ast.List) for target in node.targets)
    return not isinstance(node, ast.AugAssign | ast.Call)


def _base_name(target: ast.AST) -> str:
    """Return the `x` of `x`, `x[0]`, `x.data`, `x.view(-1)` and `*x`, or a dotted name; "" for anything else."""
    while True:
        if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            target = target.func.value
        elif isinstance(target, ast.Subscript | ast.Starred) or (
            isinstance(target, ast.Attribute) and target.attr in _SAME_MEMORY
        ):
            target = target.value
        else:
            break
    return ast.unparse(target) if isinstance(target, ast.Name | ast.Attribute) else ""


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
