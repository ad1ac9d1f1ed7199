"""What a name of a function stands for at a place in it: the definitions that are certain, and those nobody reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from functools import cached_property
from itertools import takewhile

import libcst as cst
from libcst.helpers import get_full_name_for_node

from nandoctor.fixes.source_expression import nodes_below
from nandoctor.fixes.source_tree import SourceTree

_COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)
_LOOPS = (cst.For, cst.While, *_COMPREHENSIONS)
_RUN_LATER = (cst.Lambda, cst.FunctionDef)
_SAME_MEMORY = ("data", "T", "mT")
Position = tuple[int, int]


class Definitions:
    """The names that one function binds, and where: its parameters are bound before its first line."""

    def __init__(self, tree: SourceTree, function: cst.FunctionDef) -> None:
        self._tree, self._function = tree, function

    @cached_property
    def _bound(self) -> dict[str, list[tuple[Position, cst.CSTNode]]]:
        """By name: where each binding has taken effect, and the node that makes it, in the order of the text."""
        found: dict[str, list[tuple[Position, cst.CSTNode]]] = {}
        for node in nodes_below(self._function.body):
            for name in _names_bound(node):
                found.setdefault(name, []).append((self._tree.end_of(node), node))
        return {name: sorted(places, key=lambda place: place[0]) for name, places in found.items()}

    def binds(self, name: str) -> bool:
        """Tell whether the function binds a name that it may have as a parameter, or writes into it."""
        return name in self._bound

    def value_of(self, name: cst.Name) -> cst.BaseExpression | None:
        """The expression that a name stands for where it is read, None where that depends on the way or the time."""
        if self._is_run_later(name):
            return None
        before = [(end, node) for end, node in self._bound.get(name.value, ()) if end <= self._tree.start_of(name)]
        node = before[-1][1] if before else None
        if (
            not isinstance(node, cst.Assign)
            or len(node.targets) != 1
            or not isinstance(node.targets[0].target, cst.Name)
        ):
            return None
        around, above = [*self._tree.ancestors(name)], [*self._tree.ancestors(node)]
        block = next(parent for parent in above if isinstance(parent, (cst.IndentedBlock, cst.SimpleStatementSuite)))
        loops = [parent for parent in around if isinstance(parent, _LOOPS) and parent not in above]
        if block not in around or any(self._binds_within(name.value, loop) for loop in loops):
            return None
        return node.value

    def means_the_same(self, expression: cst.CSTNode, place: cst.CSTNode) -> bool:
        """Tell whether the names in an expression stand for the same at a later place of the function."""
        start, end = self._tree.end_of(expression), self._tree.start_of(place)
        above = [*self._tree.ancestors(expression)]
        loops = [parent for parent in self._tree.ancestors(place) if isinstance(parent, _LOOPS) and parent not in above]
        if self._is_run_later(place):
            return False
        for name in self._names_read(expression):
            between = any(start < where <= end for where, _ in self._bound.get(name, ()))
            if between or any(self._binds_within(name, loop) for loop in loops):
                return False
        return True

    def is_written_into(self, expression: cst.CSTNode) -> bool:
        """Tell whether the function changes a tensor that is read in an expression in place, anywhere."""
        places = (place for name in self._names_read(expression) for place in self._bound.get(name, ()))
        return any(not _only_binds(node) for _, node in places)

    def _names_read(self, expression: cst.CSTNode) -> set[str]:
        """The names in an expression, and the attributes: `self.scale` beside `self`."""
        nodes = (expression, *nodes_below(expression))
        attributes = {self._tree.code(node) for node in nodes if isinstance(node, cst.Attribute)}
        return self._tree.names_in(expression) | attributes

    def _is_run_later(self, node: cst.CSTNode) -> bool:
        """Tell whether a node is in a function inside of this one: its names are looked up when that is called."""
        inside = takewhile(lambda parent: parent is not self._function, self._tree.ancestors(node))
        return any(isinstance(parent, _RUN_LATER) for parent in inside)

    def _binds_within(self, name: str, loop: cst.CSTNode) -> bool:
        start, end = self._tree.start_of(loop), self._tree.end_of(loop)
        return any(start < where <= end for where, _ in self._bound.get(name, ()))

    def unread(
        self, candidates: Iterable[cst.Assign], replaced: Iterable[cst.CSTNode], still_read: Set[str]
    ) -> list[cst.Assign]:
        """The assignments among the candidates that nothing reads once the `replaced` expressions are gone."""
        gone: set[cst.CSTNode] = {below for node in replaced for below in (node, *nodes_below(node))}
        left, found = list(candidates), list[cst.Assign]()
        while True:
            read = [
                node
                for node in nodes_below(self._function)
                if isinstance(node, cst.Name) and node not in gone and not self._is_target(node)
            ]
            more = [node for node in left if _name_of(node) not in still_read and not self._reads(node, read)]
            if not more:
                return found
            found += more
            left = [node for node in left if node not in more]
            gone.update(below for node in more for below in nodes_below(node))

    def _reads(self, assignment: cst.Assign, names: Iterable[cst.Name]) -> bool:
        """Tell whether one of the names may stand for what an assignment gives."""
        same = (name for name in names if name.value == _name_of(assignment))
        return any(self.value_of(name) in (None, assignment.value) for name in same)

    def _is_target(self, node: cst.Name) -> bool:
        return isinstance(next(self._tree.ancestors(node), None), cst.AssignTarget)

    def is_no_read(self, node: cst.Name) -> bool:
        """Tell whether a name is what is assigned to, an attribute of something, or a keyword."""
        parent = next(self._tree.ancestors(node), None)
        is_part = isinstance(parent, cst.Attribute) and node is parent.attr
        return is_part or self._is_target(node) or (isinstance(parent, cst.Arg) and node is parent.keyword)


def in_loop(tree: SourceTree, node: cst.CSTNode) -> bool:
    """Tell whether a node is run again by a loop around it, of its function or outside."""
    return any(isinstance(parent, _LOOPS) for parent in tree.ancestors(node))


def _name_of(node: cst.Assign) -> str:
    target = node.targets[0].target
    return target.value if isinstance(target, cst.Name) else ""


def _names_bound(node: cst.CSTNode) -> Iterator[str]:
    """The names that a node binds, deletes or writes into: `x`, `x[0]`, `x.add_(1)`, `relu(x, inplace=True)` alike."""
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
    """What a call changes in place, as far as its text tells."""
    function = call.func
    name = function.attr.value if isinstance(function, cst.Attribute) else getattr(function, "value", "")
    keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
    inplace = keywords.get("inplace")
    is_named_so = isinstance(name, str) and name.endswith("_") and not name.endswith("__")
    if is_named_so or (isinstance(inplace, cst.Name) and inplace.value == "True"):
        yield from (function.value,) if isinstance(function, cst.Attribute) else ()
        yield from (arg.value for arg in call.args[:1])
    if "out" in keywords:
        yield keywords["out"]


def _only_binds(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Assign):
        return all(isinstance(item.target, (cst.Name, cst.Tuple, cst.List)) for item in node.targets)
    return not isinstance(node, (cst.AugAssign, cst.Call))


def _base_name(target: cst.CSTNode) -> str:
    """The `x` of `x`, `x[0]`, `x.data`, `x.view(-1)` and `*x`, `self.scale` of that; "" where it is no name."""
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
