"""One statement taken apart: what is computed in it, and which submodules are called in between.

In: a line of source. Out: `Step`s that do the same one after the other, each with or without computing of its own.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count

import torch

from nandoctor.evidence.trace import SourceLine

NAMESPACES = frozenset({"torch", "F", "functional", "nn", "math", "np", "numpy", "self", "super"})
# What is called in here is called several times, or not at all: it cannot be called before.
_OWN_SCOPES = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# They hand values on or make them zero: in fp32 they are the same.
_SELECTING = frozenset({"F.relu", "torch.relu"})
_COMPUTING = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.AugAssign)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A statement; `computes` tells whether it has ops of its own, `tensors` are the variables that these read."""

    text: str
    computes: bool
    tensors: tuple[str, ...]


def stage(text: str, *, taken: Collection[str] = ()) -> tuple[Step, ...]:
    """The statement in steps: calls of `self`'s submodules and methods for themselves, what goes into them before.

    `taken` are names that mean something already where the statement stands, beside those that it reads itself.
    Empty where that cannot be told: a part of a longer statement, a loop or a condition on one line, or submodules
    called in one.
    """
    tree = parse(text)
    if (
        tree is None
        or len(tree.body) != 1
        or hasattr(tree.body[0], "body")
        or any(_calls_submodules(node) for node in ast.walk(tree) if isinstance(node, _OWN_SCOPES))
    ):
        return ()
    staging = _Staging({*taken, *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))})
    last = staging.take(tree.body[0])
    steps = [*staging.steps, _step(last)]
    return (_step(tree.body[0], text),) if len(steps) == 1 else tuple(steps)


def find_words(source: SourceLine) -> frozenset[str]:
    """All words of the file, as far as it is at hand."""
    return frozenset(re.findall(r"\w+", "".join(linecache.getlines(source.file))))


def find_statement(source: SourceLine) -> str:
    """The statement that the line is a part of, on one line; the line itself where the file is not at hand."""
    lines = linecache.getlines(source.file)
    if source.line > len(lines) or lines[source.line - 1].strip() != source.text:
        return source.text
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return source.text
    simple = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    around = [node for node in simple if node.lineno <= source.line <= (node.end_lineno or node.lineno)]
    if len(around) != 1:  # the head of a block, or several statements
        return source.text
    is_one_line = around[0].lineno == around[0].end_lineno
    return (ast.get_source_segment("".join(lines), around[0]) if is_one_line else None) or ast.unparse(around[0])


def parse(text: str) -> ast.Module | None:
    """The syntax tree of a line; None for a part of a longer statement."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def root(node: ast.AST) -> str:
    """The variable at the beginning of `a.b[c].d`; "" where it begins otherwise."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Staging(ast.NodeTransformer):
    """Puts names in place of the calls of submodules, and keeps the calls as steps."""

    def __init__(self, taken: Collection[str]) -> None:
        self.steps: list[Step] = []
        self._names = (name for name in map(_name, count()) if name not in taken)

    def take(self, statement: ast.stmt) -> ast.stmt:
        """The statement with names for calls; a call that is all of its value stays."""
        value = statement.value if isinstance(statement, (ast.Return, ast.Assign, ast.Expr)) else None
        if isinstance(value, ast.Call) and _is_submodule_call(value):
            self._with_plain_arguments(value)
            return statement
        return self.visit(statement)  # type: ignore[no-any-return]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not _is_submodule_call(node):
            return self.generic_visit(node)
        return self._named(self._with_plain_arguments(node))

    def _with_plain_arguments(self, node: ast.Call) -> ast.Call:
        if not any(_computes(argument) for argument in _arguments(node)):
            return node
        for place, argument in enumerate(node.args):
            node.args[place] = self._plain(argument)
        for keyword in node.keywords:
            keyword.value = self._plain(keyword.value)
        return node

    def _plain(self, argument: ast.expr) -> ast.expr:
        if isinstance(argument, ast.Starred) or not _computes(argument):
            return argument
        if isinstance(argument, ast.Call) and _is_submodule_call(argument):
            return self._with_plain_arguments(argument)
        return self._named(self.visit(argument))

    def _named(self, value: ast.expr) -> ast.Name:
        name = next(self._names)
        assignment = ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value, lineno=1)
        self.steps.append(_step(assignment))
        return ast.Name(id=name, ctx=ast.Load())


def _name(place: int) -> str:
    return f"h{place or ''}"


def _step(statement: ast.stmt, text: str | None = None) -> Step:
    return Step(text=text or ast.unparse(statement), computes=_computes(statement), tensors=_tensors(statement))


def _is_submodule_call(node: ast.AST | None) -> bool:
    """Whether this calls a submodule or a method of `self`; `self.weight.exp()` is an op."""
    if not isinstance(node, ast.Call) or root(node.func) != "self" or isinstance(node.func, ast.Name):
        return False
    is_direct = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    return is_direct or not (isinstance(node.func, ast.Attribute) and hasattr(torch.Tensor, node.func.attr))


def _calls_submodules(node: ast.AST) -> bool:
    return any(_is_submodule_call(inner) for inner in ast.walk(node))


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    yield from node.args
    yield from (keyword.value for keyword in node.keywords)


def _computes(node: ast.AST) -> bool:
    """Whether there is an op in it that is not a submodule's; numbers and indices are none."""
    if isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)):
        return False
    is_op = isinstance(node, ast.Call) and not _is_submodule_call(node) and ast.unparse(node.func) not in _SELECTING
    if isinstance(node, _COMPUTING) or is_op:
        return True
    inner = (node.value,) if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
    return any(_computes(child) for child in inner)


def _tensors(tree: ast.AST) -> tuple[str, ...]:
    """The variables that are read, without namespaces, called functions, indices and options; all may be tensors."""
    return tuple(dict.fromkeys(name for name in _read(tree) if name not in NAMESPACES | _bound_names(tree)))


def _bound_names(tree: ast.AST) -> set[str]:
    """The variables that comprehensions and lambdas make for themselves."""
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.comprehension)]
    looped = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return looped | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _read(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield from (node.id,) if isinstance(node.ctx, ast.Load) else ()
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    if isinstance(node, ast.Call):
        inner: list[ast.AST] = [*node.args]
        if not isinstance(node.func, ast.Name):
            inner.insert(0, node.func)
    else:
        inner = [node.value] if isinstance(node, ast.Subscript) else [*ast.iter_child_nodes(node)]
    for child in inner:
        yield from _read(child)
