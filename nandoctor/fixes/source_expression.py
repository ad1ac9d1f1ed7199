"""The source expression that called an op, and its arguments by the names of the op's schema."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import libcst as cst
import torch

from nandoctor.evidence.trace import OpCall, SourceLine
from nandoctor.fixes.source_tree import Replacement, SourceTree, Wrap, name_called, nodes_in
from nandoctor.ops import PRODUCTS

HAS_EFFECTS = (cst.Call, cst.NamedExpr, cst.Await)
"""Expressions that may have side effects, so they must not be evaluated twice."""
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
_LOW_NAMES = frozenset({"half", "float16", "bfloat16"})
_REFLECTED = frozenset({"reciprocal", "rsub"})
"""The ops that `1 / x` and `1 - x` call: their first argument is the right operand."""
_COMMUTES = frozenset({"add", "mul"})
"""Ops that `2 * x` calls with the right operand first, too."""
_SECOND = frozenset({"other", "exponent", "tensor2", "mat2", "vec2"})


class CannotWriteError(Exception):
    """No source text is known that does what the edit does."""


class Expression:
    """The expression of one op: an operator, or a call of a function or method; `op` is None if it was not traced."""

    def __init__(
        self, tree: SourceTree, node: cst.BaseExpression | cst.AugAssign, op: OpCall | None, op_name: str = ""
    ) -> None:
        self.tree, self.node, self.op = tree, node, op
        self.op_name = op_name or (op.op if op is not None else "")

    @cached_property
    def spelled(self) -> cst.BaseExpression | cst.AugAssign:
        """The expression with the op's tensors spelled out: `pair[0], pair[1]` for `*pair`, and `**pair` by name."""
        if not isinstance(self.node, cst.Call) or self.op is None or self.op.scalars:
            return self.node  # what else the packed arguments contain is unknown
        given, packed = self.node.args[:-1], self.node.args[-1] if self.node.args else None
        if packed is None or not packed.star or not isinstance(packed.value, cst.Name):
            return self.node
        names = [tensor.name for tensor in self.op.inputs][len(given) + (self._owner is not None) :]
        owner = packed.value.value
        items = [f"{owner}[{n}]" for n in range(len(names))]
        if packed.star == "**":
            keywords = ("input" if name == "self" else name for name in names)
            items = [f'{name}={owner}["{name}"]' for name in keywords]
        arguments = [self.tree.module.code_for_node(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for arg in given]
        return cst.parse_expression(f"{self.tree.code(self.node.func)}({', '.join([*arguments, *items])})")

    @property
    def _owner(self) -> cst.BaseExpression | None:
        """The `x` of `x.sum()`."""
        function = self.node.func if isinstance(self.node, cst.Call) else None
        if not isinstance(function, cst.Attribute) or self._is_namespace(function.value) or self.calls_module():
            return None
        return function.value

    def with_texts(self, texts: Mapping[cst.CSTNode, str], before: tuple[str, ...]) -> Iterator[Replacement]:
        """Yield the replacements that give some arguments other texts."""
        if self.spelled is self.node:
            yield from (Replacement(node=node, text=text, before=before) for node, text in texts.items())
        else:
            yield Replacement(node=self.node, text=text_with(self.tree, self.spelled, texts), before=before)

    @cached_property
    def _arguments(self) -> list[tuple[str | None, cst.BaseExpression]]:
        """The arguments in the order of the op's schema, each with its keyword, if any."""
        node = self.spelled
        if isinstance(node, cst.BinaryOperation):
            left, right = node.left, node.right
            is_reflected = self.op_name in _REFLECTED or (self.op_name in _COMMUTES and number_in(left) is not None)
            return [(None, right), (None, left)] if is_reflected else [(None, left), (None, right)]
        if isinstance(node, cst.AugAssign):
            return [(None, target_of(node)), (None, node.value)]
        if isinstance(node, cst.UnaryOperation):
            return [(None, node.expression)]
        if isinstance(node, cst.Subscript):
            return [(None, node.value)]
        if not isinstance(node, cst.Call):
            raise CannotWriteError
        given = [(arg.keyword.value if arg.keyword else None, arg.value) for arg in node.args if not arg.star]
        function = node.func
        if isinstance(function, cst.Call) and self.tree.code(function.func) == "getattr" and function.args:
            given.insert(0, (None, function.args[0].value))
        if self._owner is not None:
            given.insert(0, (None, self._owner))
        return given

    def calls_module(self) -> bool:
        """Return True if the torch module that ran the op is called: `self.norm(x)`, not `x.norm()` in a "norm"."""
        if not isinstance(self.node, cst.Call) or self.op is None or self._is_namespace(self.node.func):
            return False
        path, kind = self.tree.code(self.node.func).partition(".")[2], self.op.type
        is_within = bool(path) and f".{path}." in f".{self.op.module}."
        return is_within and hasattr(torch.nn, kind) and self.tree.class_around(self.node) != kind

    def _is_namespace(self, node: cst.BaseExpression) -> bool:
        while isinstance(node, cst.Attribute):
            node = node.value
        return isinstance(node, cst.Name) and node.value in self.tree.imported_names

    def argument_node(self, name: str) -> cst.BaseExpression:
        """Return the argument of this name in the op's schema."""
        for keyword, value in self._arguments:
            if keyword == name:
                return value
        place = {"self": 0, "input": 0, "attn_mask": 3, "dim": 1, "value": 2}.get(name, 1 if name in _SECOND else None)
        positional = [value for keyword, value in self._arguments if keyword is None]
        if place is None or place >= len(positional):
            raise CannotWriteError
        return positional[place]

    def argument(self, name: str) -> str:
        """Return the text of that argument."""
        return self.tree.code(self.argument_node(name))

    def texts_after_first(self) -> list[str]:
        """Return the arguments except the first, as they are written: `dim=1, keepdim=True`."""
        return [
            f"{keyword}={self.tree.code(value)}" if keyword else self.tree.code(value)
            for keyword, value in self._arguments[1:]
        ]

    def takes_eps(self, was: float) -> bool:
        """Return True if the call is of a torch function whose default eps is this number."""
        function = getattr(torch.nn.functional, name_called(self.node), None)
        try:
            eps = inspect.signature(function).parameters.get("eps") if callable(function) else None
        except ValueError:  # a function written in C++
            return False
        return eps is not None and eps.default == was

    def with_keyword(
        self, name: str, value: str, texts: Mapping[cst.BaseExpression, str] = MappingProxyType({})
    ) -> str:
        """Return the call with a value for a keyword, which replaces an old one and comes last.

        `texts` replace other arguments.
        """
        node = self.node
        for argument, text in texts.items():
            node = node.deep_replace(argument, parse_expression(text))
        if not isinstance(node, cst.Call):
            raise CannotWriteError
        others = [arg for arg in node.args if arg.keyword is None or arg.keyword.value != name]
        added = cst.Arg(
            keyword=cst.Name(name),
            value=cst.parse_expression(value),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        )
        if others:
            last = others[-1]  # its trailing comma, if any, holds the line break before the parenthesis
            is_spread = isinstance(last.comma, cst.Comma)
            between = cst.Comma(whitespace_after=node.whitespace_before_args) if is_spread else _COMMA
            added = added.with_changes(comma=last.comma)
            others[-1] = last.with_changes(comma=between)
        return self.tree.code(node.with_changes(args=[*others, added]))

    def constants(self, number: float) -> list[cst.BaseExpression]:
        """Return the arguments that are written as this number."""
        return [value for _, value in self._arguments if number_in(value) == number]

    def is_whole(self, statement: cst.SimpleStatementLine) -> bool:
        """Return True if the statement only assigns, returns or evaluates the expression."""
        (small,) = statement.body
        value = small.value if isinstance(small, (cst.Assign, cst.AnnAssign, cst.Return, cst.Expr)) else None
        return value is self.node

    def widened(self) -> str:
        """Return the expression with its tensors cast to fp32; for an operator one is enough, since torch promotes."""
        tensors = list(self.tensors())
        if not tensors or self.op is None:
            raise CannotWriteError
        if isinstance(self.node, (cst.BinaryOperation, cst.AugAssign)) and self.op.op not in PRODUCTS:
            tensors = [self._promoting(tensors)]
        if isinstance(self.node, cst.AugAssign):
            operator, target = operator_text(self.tree, self.node), self.tree.code(target_of(self.node))
            wide = float_text(self.tree, target_of(self.node))
            return f"{target} = {wide} {operator} {operand_text(self.tree, self.node.value)}"
        return text_with(self.tree, self.spelled, {value: _in_fp32(self.tree, value) for value in tensors})

    def _promoting(self, tensors: Sequence[cst.BaseExpression]) -> cst.BaseExpression:
        """Return the operand that decides the result's dtype: a 0-dim one does not promote one with dimensions.

        https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion
        """
        assert self.op is not None
        shapes = [tensor.stats.shape for tensor in self.op.inputs if tensor.stats is not None]
        return max(zip(tensors, shapes, strict=False), key=lambda taken: bool(taken[1]))[0]

    def cast_to_fp32(self) -> Replacement:
        """Return a replacement that turns a cast to low precision into one to fp32, by the name of the dtype alone."""
        node = self.node
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            if node.func.attr.value in _LOW_NAMES:
                return Replacement(node=node.func.attr, text="float")
            for argument in node.args:
                if self.tree.code(argument.value).rpartition(".")[2] in _LOW_NAMES:
                    return Replacement(node=argument.value, text="torch.float32")
        raise CannotWriteError

    def tensors(self) -> Iterator[cst.BaseExpression]:
        """Yield the arguments that were floating-point tensors in the trace, as far as that is known."""
        if self.op is None:
            return
        left = sum(tensor.stats is not None for tensor in self.op.inputs)
        names = {tensor.name for tensor in self.op.inputs if tensor.stats is not None}
        numbers = {name for name, _ in self.op.scalars}
        for place, (keyword, value) in enumerate(self._arguments):
            schema_name = keyword or ("self" if place == 0 else "other" if place == 1 else "")
            literal = isinstance(value, (cst.BaseString, cst.BaseNumber)) or number_in(value) is not None
            if literal or (schema_name in numbers and schema_name not in names):
                continue
            if left and (keyword is None or keyword in names):
                left -= 1
                yield value


class _Substitution(cst.CSTTransformer):
    """Replaces some nodes of a tree."""

    def __init__(self, new_nodes: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        self._new_nodes = new_nodes

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        return self._new_nodes.get(original_node, updated_node)


def parse_expression(text: str) -> cst.BaseExpression:
    """Parse an expression; one over several lines is put in parentheses again."""
    try:
        return cst.parse_expression(text)
    except cst.ParserSyntaxError:
        return cst.parse_expression(f"({text})")


def text_with(tree: SourceTree, node: cst.CSTNode, texts: Mapping[cst.CSTNode, str]) -> str:
    """Return the source of an expression with other texts for some nodes in it."""
    changed = node.visit(_Substitution({old: parse_expression(text) for old, text in texts.items()}))
    assert isinstance(changed, cst.BaseExpression)
    return tree.code(changed)


def target_of(node: cst.AugAssign) -> cst.BaseExpression:
    """Return the expression that an augmented assignment writes to."""
    if not isinstance(node.target, cst.BaseExpression):
        raise CannotWriteError
    return node.target


_MODULES_OF_NUMBERS = frozenset({"math", "np", "numpy", "torch"})
_ARITHMETIC: Mapping[type, Callable[[float, float], float]] = {
    cst.Add: operator.add,
    cst.Subtract: operator.sub,
    cst.Multiply: operator.mul,
    cst.Divide: operator.truediv,
    cst.Power: operator.pow,
}


def number_in(node: cst.CSTNode) -> float | None:
    """Return the value of a constant expression, else None: `-1e-8`, `2 ** -24`, `math.sqrt(2 * math.pi)`."""
    try:
        number = _evaluate(node)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return number if isinstance(number, float) else None


def _evaluate(node: cst.CSTNode) -> float:  # noqa: PLR0911 - a table of forms
    """Evaluate a constant expression; raises TypeError for anything else."""
    match node:
        case cst.UnaryOperation(operator=cst.Minus()):
            return -_evaluate(node.expression)
        case cst.Integer() | cst.Float():
            return float(node.evaluated_value)
        case cst.BinaryOperation() if type(node.operator) in _ARITHMETIC:
            return _ARITHMETIC[type(node.operator)](_evaluate(node.left), _evaluate(node.right))
        case cst.Attribute(attr=cst.Name("inf")):
            return math.inf
        case cst.Attribute(value=cst.Name(module), attr=cst.Name("pi" | "e" as name)) if module in _MODULES_OF_NUMBERS:
            return float(getattr(math, name))
        case cst.Call(func=cst.Name("float"), args=[cst.Arg(value=cst.SimpleString() as text)]):
            return float(str(text.evaluated_value))
        case cst.Call(func=cst.Attribute(value=cst.Name("math"), attr=cst.Name("sqrt" | "log" | "exp" as name))):
            return float(getattr(math, name)(*(_evaluate(item.value) for item in node.args)))
    raise TypeError


def grouped(text: str) -> str:
    """Return the text of an expression, in parentheses unless an attribute can follow it directly."""
    node = parse_expression(text)
    is_closed = bool(node.lpar) and cst.Module([]).code_for_node(node) == text
    plain = isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.Float))
    return text if plain or is_closed else f"({text})"


def negated(text: str) -> str:
    """Return the text of the negated expression."""
    first = cst.parse_expression(f"({text})")
    while isinstance(first, cst.BinaryOperation) and isinstance(first.operator, cst.Multiply | cst.Divide):
        first = first.left
    if text.startswith("-") and isinstance(first, cst.UnaryOperation):
        return text[1:].lstrip()
    return f"-{grouped(text)}"


def operator_text(tree: SourceTree, node: cst.AugAssign) -> str:
    """Return the operator of an augmented assignment as text between two operands: `+` for `+=`."""
    return tree.module.code_for_node(node.operator).strip().removesuffix("=")


def operand_text(tree: SourceTree, node: cst.BaseExpression) -> str:
    """Return the text of an expression as an operand, or before an attribute."""
    return grouped(tree.code(node))


def _in_fp32(tree: SourceTree, node: cst.BaseExpression) -> str:
    """Return the text of a tensor cast to fp32, without the code's own `.half()`."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "half":
        node = node.func.value
    return float_text(tree, node)


def float_text(tree: SourceTree, node: cst.BaseExpression) -> str:
    """Return the text of an expression cast to fp32."""
    return f"{operand_text(tree, node)}.float()"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """The changes of one file: what is replaced, the new `names`, and the assignments that are left `unread`."""

    tree: SourceTree
    file: Path
    names: set[str] = field(default_factory=set)
    replacements: list[Replacement] = field(default_factory=list)
    wraps: list[Wrap] = field(default_factory=list)
    unread: list[cst.Assign] = field(default_factory=list)

    def find(self, source: SourceLine) -> cst.BaseExpression | cst.AugAssign | None:
        """Return the expression at an op's place; None if the place is only a line, or in another file."""
        return self.tree.find(source) if Path(source.file) == self.file else None

    def replace(self, node: cst.CSTNode, text: str, before: tuple[str, ...] = ()) -> None:
        """Replace an expression by a text, and put statements before its own statement."""
        self.replacements.append(Replacement(node=node, text=text, before=before))

    def new_name(self, wanted: str, node: cst.CSTNode) -> str:
        """Return a name that neither the function around a node nor another change of the file uses."""
        name = self.tree.free_name(wanted, node, self.names)
        self.names.add(name)
        return name

    def named(self, node: cst.CSTNode, text: str, wanted: str) -> tuple[str, str, tuple[str, ...]]:
        """Return the text of a value for its first use and for later uses, and the statements to put before.

        It is computed once: by a statement before its own or, if none can be put there, by `:=` at its first use.
        """
        parsed = parse_expression(text)
        if isinstance(parsed, (cst.Name, cst.Attribute)):
            return text, text, ()
        text = f"({text})" if parsed.lpar else text
        name = self.new_name(wanted, node)
        if self.tree.statement_of(node) is None:
            return f"({name} := {text})", name, ()
        return name, name, (f"{name} = {text}",)

    def computed_once(self, node: cst.BaseExpression, wanted: str) -> tuple[str, str, tuple[str, ...]]:
        """Return the text of an expression that is used twice, like `named`; without a call in it, just the text.

        A call may draw random numbers, or update the statistics of a layer.
        """
        text = self.tree.code(node)
        if any(isinstance(below, HAS_EFFECTS) for below in nodes_in(node)):
            return self.named(node, text, wanted)
        return text, text, ()
