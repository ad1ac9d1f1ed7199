"""The expression that called an op, as the source has it: its arguments by the names of the op's schema."""

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
from nandoctor.fixes.source_tree import Replacement, SourceTree, Wrap, nodes_in
from nandoctor.ops import PRODUCTS

HAS_EFFECTS = (cst.Call, cst.NamedExpr, cst.Await)
"""What may not be evaluated a second time."""
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
_LOW_NAMES = frozenset({"half", "float16", "bfloat16"})
_REFLECTED = frozenset({"reciprocal", "rsub"})
"""What `1 / x` and `1 - x` call: their first argument is the operand on the right."""
_COMMUTES = frozenset({"add", "mul"})
"""`2 * x` calls these as well with what is on the right first."""
_SECOND = frozenset({"other", "exponent", "tensor2", "mat2", "vec2"})


class CannotWriteError(Exception):
    """No text is known that does what the edit does."""


class Expression:
    """The expression of one op: an operator, or a call of a function or a method; `op` may not have been traced."""

    def __init__(
        self, tree: SourceTree, node: cst.BaseExpression | cst.AugAssign, op: OpCall | None, op_name: str = ""
    ) -> None:
        self.tree, self.node, self.op = tree, node, op
        self._op_name = op_name or (op.op if op is not None else "")

    @cached_property
    def spelled(self) -> cst.BaseExpression | cst.AugAssign:
        """The expression, with `*pair` written out as `pair[0], pair[1]` and `**pair` by name: the op's tensors."""
        if not isinstance(self.node, cst.Call) or self.op is None or self.op.scalars:
            return self.node  # what else is in it is not known
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

    def with_texts(self, texts: Mapping[cst.CSTNode, str], before: tuple[str, ...] = ()) -> Iterator[Replacement]:
        """The expression with other text for some of its arguments."""
        if self.spelled is self.node:
            yield from (Replacement(node=node, text=text, before=before) for node, text in texts.items())
        else:
            yield Replacement(node=self.node, text=text_with(self.tree, self.spelled, texts), before=before)

    @cached_property
    def _given(self) -> list[tuple[str | None, cst.BaseExpression]]:
        """The arguments in the order of the op's schema, each with the keyword it was given by."""
        node = self.spelled
        if isinstance(node, cst.BinaryOperation):
            left, right = node.left, node.right
            is_reflected = self._op_name in _REFLECTED or (self._op_name in _COMMUTES and number_in(left) is not None)
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
        """Tell whether a module of torch is called, whose op it is: `self.norm(x)`, not `x.norm()` in a "norm"."""
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
        """The argument of this name in the op's schema."""
        for keyword, value in self._given:
            if keyword == name:
                return value
        place = {"self": 0, "input": 0, "attn_mask": 3, "dim": 1, "value": 2}.get(name, 1 if name in _SECOND else None)
        positional = [value for keyword, value in self._given if keyword is None]
        if place is None or place >= len(positional):
            raise CannotWriteError
        return positional[place]

    def argument(self, name: str) -> str:
        """The text of that argument."""
        return self.tree.code(self.argument_node(name))

    def texts_after_first(self) -> list[str]:
        """The arguments but for the first, as they are written: `dim=1, keepdim=True`."""
        return [
            f"{keyword}={self.tree.code(value)}" if keyword else self.tree.code(value)
            for keyword, value in self._given[1:]
        ]

    def takes_eps(self, was: float) -> bool:
        """Tell whether the call is of a function of torch whose eps is this number by default."""
        if not isinstance(self.node, cst.Call):
            return False
        function = getattr(torch.nn.functional, self.tree.code(self.node.func).rpartition(".")[2], None)
        try:
            eps = inspect.signature(function).parameters.get("eps") if callable(function) else None
        except ValueError:  # it is written in C++
            return False
        return eps is not None and eps.default == was

    def with_keyword(
        self, name: str, value: str, texts: Mapping[cst.BaseExpression, str] = MappingProxyType({})
    ) -> str:
        """The call with a value for a keyword, in the place of the one that it has or after all others.

        `texts` stand in the places of arguments.
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
            last = others[-1]  # the comma behind it, where there is one, has the line break before the parenthesis
            is_spread = isinstance(last.comma, cst.Comma)
            between = cst.Comma(whitespace_after=node.whitespace_before_args) if is_spread else _COMMA
            added = added.with_changes(comma=last.comma)
            others[-1] = last.with_changes(comma=between)
        return self.tree.code(node.with_changes(args=[*others, added]))

    def constants(self) -> Iterator[cst.BaseExpression]:
        """The numbers written in the arguments themselves."""
        yield from (value for _, value in self._given if number_in(value) is not None)

    def is_whole(self, statement: cst.SimpleStatementLine) -> bool:
        """Tell whether the statement does nothing but name or return the value of the expression."""
        (small,) = statement.body
        value = small.value if isinstance(small, (cst.Assign, cst.AnnAssign, cst.Return, cst.Expr)) else None
        return value is self.node

    def widened(self) -> str:
        """The expression with its low-precision tensors cast to fp32: of an operator one is enough, torch promotes."""
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
        """The operand that the dtype of the result follows: one without dimensions does not widen one that has some.

        https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion
        """
        assert self.op is not None
        shapes = [tensor.stats.shape for tensor in self.op.inputs if tensor.stats is not None]
        return max(zip(tensors, shapes, strict=False), key=lambda taken: bool(taken[1]))[0]

    def cast_to_fp32(self) -> Replacement:
        """The cast to a low precision that the code asks for, to fp32: what names the dtype is all that changes."""
        node = self.node
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            if node.func.attr.value in _LOW_NAMES:
                return Replacement(node=node.func.attr, text="float")
            for argument in node.args:
                if self.tree.code(argument.value).rpartition(".")[2] in _LOW_NAMES:
                    return Replacement(node=argument.value, text="torch.float32")
        raise CannotWriteError

    def tensors(self) -> Iterator[cst.BaseExpression]:
        """The arguments that were floating-point tensors in the trace, as far as it can be told."""
        if self.op is None:
            return
        left = sum(tensor.stats is not None for tensor in self.op.inputs)
        names = {tensor.name for tensor in self.op.inputs if tensor.stats is not None}
        numbers = {name for name, _ in self.op.scalars}
        for place, (keyword, value) in enumerate(self._given):
            schema_name = keyword or ("self" if place == 0 else "other" if place == 1 else "")
            literal = isinstance(value, (cst.BaseString, cst.BaseNumber)) or number_in(value) is not None
            if literal or (schema_name in numbers and schema_name not in names):
                continue
            if left and (keyword is None or keyword in names):
                left -= 1
                yield value


class _Substitution(cst.CSTTransformer):
    """Puts new nodes in the place of some of a tree's own."""

    def __init__(self, new_nodes: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        self._new_nodes = new_nodes

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        return self._new_nodes.get(original_node, updated_node)


def parse_expression(text: str) -> cst.BaseExpression:
    """The expression that a text is; one over several lines gets the parentheses that it stood in."""
    try:
        return cst.parse_expression(text)
    except cst.ParserSyntaxError:
        return cst.parse_expression(f"({text})")


def text_with(tree: SourceTree, node: cst.CSTNode, texts: Mapping[cst.CSTNode, str]) -> str:
    """The source of an expression with other text for some of the nodes below it."""
    changed = node.visit(_Substitution({old: parse_expression(text) for old, text in texts.items()}))
    assert isinstance(changed, cst.BaseExpression)
    return tree.code(changed)


def target_of(node: cst.AugAssign) -> cst.BaseExpression:
    """The expression that an augmented assignment writes to."""
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
    """The number that an expression of numbers alone comes to: `-1e-8`, `2 ** -24`, `math.sqrt(2 * math.pi)`."""
    try:
        number = _evaluate(node)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return number if isinstance(number, float) else None


def _evaluate(node: cst.CSTNode) -> float:  # noqa: PLR0911 - a table of forms
    """Compute an expression of numbers; raises TypeError for what is none."""
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
    """The text of an expression, in parentheses where an attribute could not follow it."""
    node = parse_expression(text)
    is_closed = bool(node.lpar) and cst.Module([]).code_for_node(node) == text
    plain = isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.Float))
    return text if plain or is_closed else f"({text})"


def negated(text: str) -> str:
    """The text of an expression with the other sign."""
    first = cst.parse_expression(f"({text})")
    while isinstance(first, cst.BinaryOperation) and isinstance(first.operator, cst.Multiply | cst.Divide):
        first = first.left
    if text.startswith("-") and isinstance(first, cst.UnaryOperation):
        return text[1:].lstrip()
    return f"-{grouped(text)}"


def operator_text(tree: SourceTree, node: cst.AugAssign) -> str:
    """The text of the operator of an augmented assignment, as it stands between two operands."""
    return tree.module.code_for_node(node.operator).strip().removesuffix("=")


def operand_text(tree: SourceTree, node: cst.BaseExpression) -> str:
    """The text of an expression as an operand or the owner of an attribute."""
    return grouped(tree.code(node))


def _in_fp32(tree: SourceTree, node: cst.BaseExpression) -> str:
    """The text of a tensor cast to fp32, in place of a cast to fp16 that the code makes itself."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "half":
        node = node.func.value
    return float_text(tree, node)


def float_text(tree: SourceTree, node: cst.BaseExpression) -> str:
    """The text of an expression cast to fp32."""
    return f"{operand_text(tree, node)}.float()"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """What is to be replaced in one file, the `names` that it binds, and the assignments that it leaves `unread`."""

    tree: SourceTree
    file: Path
    names: set[str] = field(default_factory=set)
    replacements: list[Replacement] = field(default_factory=list)
    wraps: list[Wrap] = field(default_factory=list)
    unread: list[cst.Assign] = field(default_factory=list)

    def find(self, source: SourceLine) -> cst.BaseExpression | cst.AugAssign | None:
        """The expression at the place of an op; None where that is only a line, or in another file."""
        return self.tree.find(source) if Path(source.file) == self.file else None

    def replace(self, node: cst.CSTNode, text: str, before: tuple[str, ...] = ()) -> None:
        """Put a text in the place of an expression, and statements before its own."""
        self.replacements.append(Replacement(node=node, text=text, before=before))

    def new_name(self, wanted: str, node: cst.CSTNode) -> str:
        """A name that neither the function around a node nor another change of the file binds."""
        name = self.tree.free_name(wanted, node, self.names)
        self.names.add(name)
        return name

    def named(self, node: cst.CSTNode, text: str, wanted: str) -> tuple[str, str, tuple[str, ...]]:
        """The text of a value that is needed more than once: the first time, then, and the statements before.

        It is computed once, by a statement before its own or, where none can be put there, where it is needed first.
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
        """The text of an expression that is needed twice, as `named` gives it; of one without a call the text alone.

        A call may draw random numbers, or update the statistics of a layer.
        """
        text = self.tree.code(node)
        if any(isinstance(below, HAS_EFFECTS) for below in nodes_in(node)):
            return self.named(node, text, wanted)
        return text, text, ()
