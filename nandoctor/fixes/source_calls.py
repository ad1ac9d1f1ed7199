"""A probability that a function is given by its only call, where its logit could be given as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import libcst as cst

from nandoctor.evidence.trace import OpCall
from nandoctor.fixes.source_definitions import Definitions
from nandoctor.fixes.source_expression import CannotWriteError, Expression, calls_in, nodes_below, text_with
from nandoctor.fixes.source_tree import Replacement, SourceTree

_MOST_FILES = 300
"""How many files a name is looked for in; where there are more, it may be anywhere."""


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
    """The parameters of one function whose values can be taken inside; `names` are those that a change binds."""

    def __init__(self, tree: SourceTree, names: set[str]) -> None:
        self._tree, self._names = tree, names
        self._named: dict[cst.BaseExpression, tuple[GivenValue, str]] = {}

    def value_of(self, parameter: cst.Name, ops: Sequence[OpCall]) -> tuple[cst.Call, OpCall] | None:
        """The sigmoid or softmax that a parameter is given, and its op; None for any other."""
        given = _value_given(self._tree, parameter)
        caller = self._tree.function_of(given.value) if given is not None else None
        if given is None or caller is None:
            return None
        op = dict(calls_in(self._tree, caller, ops)).get(given.value)
        if op is None or op.source is None or op.op not in ("sigmoid", "softmax"):
            return None
        expression = Expression(self._tree, given.value, op)
        dims = [text.removeprefix("dim=").removeprefix("-") for text in expression.texts_after_first()]
        is_alike = op.op == "sigmoid" or (dims and all(map(str.isdecimal, dims)))
        if not is_alike or _is_named_elsewhere(Path(op.source.file), _defined_name(self._tree, given.function)):
            return None
        inner = expression.argument_node("self")
        if inner not in self._named:
            self._named[inner] = given, ""
        return given.value, op

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


def _value_given(tree: SourceTree, parameter: cst.Name) -> GivenValue | None:
    """The call that is given for a parameter which the function does not bind anew; None where that is not certain."""
    function = tree.function_of(parameter)
    if function is None or Definitions(tree, function).binds(parameter.value):
        return None
    names = [item.name for item in function.params.params]
    own = next((name for name in names if name.value == parameter.value), None)
    called = _name_of_calls(tree, function)
    everywhere = [*nodes_below(tree.module)]
    calls = [node for node in everywhere if isinstance(node, cst.Call) and _called(node) == called]
    named = [node for node in everywhere if isinstance(node, cst.Name) and node.value == called]
    if own is None or len(calls) != 1 or len(named) > 2 or any(arg.star for arg in calls[0].args):
        return None  # it is named where it is called, and where it is defined or, of a module, kept
    by_name = {arg.keyword.value: arg.value for arg in calls[0].args if arg.keyword is not None}
    positional = (arg.value for arg in calls[0].args if arg.keyword is None)
    by_place = dict(zip((name.value for name in names if name.value != "self"), positional, strict=False))
    value = (by_place | by_name).get(own.value)
    return GivenValue(function=function, parameter=own, value=value) if isinstance(value, cst.Call) else None


def _defined_name(tree: SourceTree, function: cst.FunctionDef) -> str:
    """The name that other code knows a function by: of a forward that of its class."""
    classes = (node.name.value for node in tree.ancestors(function) if isinstance(node, cst.ClassDef))
    return next(classes, "") if function.name.value == "forward" else function.name.value


def _is_named_elsewhere(file: Path, name: str) -> bool:
    """Tell whether another file of the folder, or below, has the name: its calls would have to change as well."""
    others = [other for other in islice(file.parent.rglob("*.py"), _MOST_FILES) if other != file]
    return len(others) + 1 >= _MOST_FILES or any(name in other.read_text(errors="ignore") for other in others)


def _name_of_calls(tree: SourceTree, function: cst.FunctionDef) -> str:
    """The last name of what calls of a function call; of a forward that of the only attribute that has its module."""
    of_class = _defined_name(tree, function)
    if function.name.value != "forward":
        return of_class
    made = [node for node in nodes_below(tree.module) if isinstance(node, cst.Call) and _called(node) == of_class]
    parent = next(tree.ancestors(made[0]), None) if len(made) == 1 else None
    target = parent.targets[0].target if isinstance(parent, cst.Assign) and len(parent.targets) == 1 else None
    return target.attr.value if isinstance(target, cst.Attribute) else ""


def _called(call: cst.Call) -> str:
    function = call.func
    named = function.attr if isinstance(function, cst.Attribute) else function
    return named.value if isinstance(named, cst.Name) else ""
