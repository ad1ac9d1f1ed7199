"""The source expression that called an op, and its arguments by the names of the op's schema."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from nandoctor.changes.editor import NO_TEXTS, Editor, Texts
from nandoctor.changes.source_tree import CannotWriteError, name_called
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import MOVES, PRODUCTS

OPERATORS: Mapping[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
    ast.Mod: "remainder",
}
"""The ops that operators between tensors call."""
_LOW_NAMES = frozenset({"half", "float16", "bfloat16"})
REFLECTED: Mapping[type, str] = {ast.Sub: "rsub", ast.Div: "reciprocal"}
"""The ops that `1 - x` and `1 / x` call: their first argument is the right operand."""
_COMMUTES = frozenset({"add", "mul"})
"""Ops that `2 * x` calls with the right operand first, too."""
_SECOND = frozenset({"other", "exponent", "target", "tensor2", "mat2", "vec2"})
_FIRST = frozenset({"self", "input", "tensors"})
_PLACES = {**dict.fromkeys(_FIRST, 0), **dict.fromkeys(_SECOND, 1), "attn_mask": 3, "dim": 1, "index": 2, "value": 2}
"""The position of an argument in a call, by its name in the op's schema."""


class Expression:
    """The expression of one op: an operator, or a call of a function or method; `op` is None if it was not traced."""

    def __init__(self, editor: Editor, node: ast.AST, op: OpCall | None, op_name: str = "") -> None:
        self.editor, self.node, self.op = editor, node, op
        self.op_name = op_name or (op.op if op is not None else "")

    @property
    def _owner(self) -> ast.expr | None:
        """The `x` of `x.sum()`."""
        function = self.node.func if isinstance(self.node, ast.Call) else None
        if not isinstance(function, ast.Attribute) or self._is_namespace(function.value) or self.calls_module():
            return None
        return function.value

    def _is_other_object(self, value: ast.expr) -> bool:
        """Return True for the `self` of `self.encode(x)`: a tensor has no such method."""
        method = self.node.func if isinstance(self.node, ast.Call) and value is self._owner else None
        return isinstance(method, ast.Attribute) and not self.editor.library.has_method(method.attr)

    @cached_property
    def arguments(self) -> list[tuple[str | None, ast.expr]]:
        """The arguments in the order of the op's schema, each with its keyword, if any."""
        match self.node:
            case ast.Call(args=args, keywords=keywords):
                owner = [self._owner] if self._owner is not None else []
                positional = [*owner, *(value for value in args if not isinstance(value, ast.Starred))]
                return [(None, value) for value in positional] + [(it.arg, it.value) for it in keywords if it.arg]
            case ast.BinOp():
                return [(None, item) for item in operands(self.node, self.op_name, self.op)]
            case ast.AugAssign(target=target, value=value):
                return [(None, target), (None, value)]
            case ast.UnaryOp(operand=value) | ast.Subscript(value=value):
                return [(None, value)]
            case ast.Attribute(value=value) if self.op_name in MOVES:  # `x.mT`
                return [(None, value)]
        raise CannotWriteError

    def calls_module(self) -> bool:
        """Return True if the torch module that ran the op is called: `self.norm(x)`, not `x.norm()` in a "norm"."""
        if not isinstance(self.node, ast.Call) or self.op is None or self._is_namespace(self.node.func):
            return False
        path, kind = self.editor.tree.code(self.node.func).partition(".")[2], self.op.place.type
        is_within = bool(path) and f".{path}." in f".{self.op.place.module}."
        classes = (item.name for item in self.editor.tree.ancestors(self.node) if isinstance(item, ast.ClassDef))
        return is_within and self.editor.library.has_module(kind) and next(classes, "") != kind

    def _is_namespace(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self.editor.tree.imported_names

    def argument_node(self, name: str) -> ast.expr:
        """Return the argument of this name in the op's schema."""
        names = (name, "input") if name == "self" else (name,)  # torch.log(input=x)
        for keyword, value in self.arguments:
            if keyword in names:
                return value
        positional = [value for keyword, value in self.arguments if keyword is None]
        place = _PLACES.get(name)
        if (item := re.fullmatch(r"tensors\[(\d+)\]", name)) is not None:
            positional, place = self._listed(positional), int(item[1])
        if place is None or place >= len(positional):
            raise CannotWriteError
        return positional[place]

    def _listed(self, positional: list[ast.expr]) -> list[ast.expr]:
        """Return the tensors of a list, or of einsum's arguments after its equation."""
        given = positional[1:] if self.op_name == "einsum" else positional[:1]
        if self.op_name == "einsum" and not isinstance(positional[0], ast.Constant):
            raise CannotWriteError  # its equation may be in lists of dimensions
        match given:
            case [ast.List(elts=elements) | ast.Tuple(elts=elements)]:
                return elements
        return given

    def argument(self, name: str) -> str:
        """Return the text of that argument."""
        return self.editor.code(self.argument_node(name))

    def texts_after_first(self) -> list[str]:
        """Return the arguments except the first, as they are written: `dim=1, keepdim=True`; not of `*dims`."""
        if isinstance(self.node, ast.Call) and has_stars(self.node):
            raise CannotWriteError
        code = self.editor.code
        return [f"{keyword}={code(value)}" if keyword else code(value) for keyword, value in self.arguments[1:]]

    def with_keyword(self, name: str, value: str, texts: Texts = NO_TEXTS) -> str:
        """Return the call with a value for a keyword, which comes last if it is new; `texts` replace arguments."""
        if not isinstance(self.node, ast.Call):
            raise CannotWriteError
        old = next((item for item in self.node.keywords if item.arg == name), None)
        if old is not None:
            return self.editor.code(self.node, {**texts, old.value: value})
        call = self.editor.code(self.node, texts)
        end = re.search(r",?\s*\)$", call)
        comma = ", " * bool(self.node.args or self.node.keywords)
        return call if end is None else f"{call[: end.start()]}{comma}{name}={value}{end[0]}"

    def widened(self) -> str:
        """Return the expression with its tensors cast to fp32; for an operator one is enough, since torch promotes."""
        tensors = list(self.tensors())
        if not tensors or self.op is None:
            raise CannotWriteError
        if isinstance(self.node, ast.BinOp | ast.AugAssign) and self.op.op not in PRODUCTS:
            # One decides the result's dtype: a 0-dim operand does not promote one with dimensions.
            # https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion
            shapes = [tensor.stats.shape for tensor in self.op.inputs if tensor.stats is not None]
            tensors = [max(zip(tensors, shapes, strict=False), key=lambda taken: bool(taken[1]))[0]]
        if isinstance(self.node, ast.AugAssign):
            target = self.node.target
            made = applied(self.node, self.in_fp32(target), self.editor.operand(self.node.value))
            return f"{self.editor.code(target)} = {made}"
        return self.editor.code(self.node, {value: self.in_fp32(value) for value in tensors})

    def in_fp32(self, node: ast.expr) -> str:
        """Return the text of a tensor cast to fp32, without the code's own `.half()`."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "half":
            node = node.func.value
        return f"{self.editor.operand(node)}.float()"

    def cast_to_fp32(self) -> None:
        """Turn a cast to low precision into one to fp32, by the name of the dtype alone."""
        if isinstance(self.node, ast.Call) and isinstance(self.node.func, ast.Attribute):
            function = self.node.func
            if function.attr in _LOW_NAMES:
                self.editor.replace(function, self.editor.code(function).removesuffix(function.attr) + "float")
                return
            for argument in (*self.node.args, *(item.value for item in self.node.keywords)):
                if self.editor.tree.code(argument).rpartition(".")[2] in _LOW_NAMES:
                    self.editor.replace(argument, "torch.float32")
                    return
        raise CannotWriteError

    @property
    def taken(self) -> list[OpTensor]:
        """The floating-point tensors that the op took, but the weights and buffers of a module that is called."""
        inputs = self.op.inputs if self.op is not None else ()
        own = ("weight", "buffer") if self.calls_module() else ()
        return [tensor for tensor in inputs if tensor.stats is not None and tensor.origin not in own]

    def tensors(self) -> Iterator[ast.expr]:
        """Yield the arguments that were floating-point tensors in the trace, as far as that is known."""
        if self.op is None:
            return
        left, names = len(self.taken), {tensor.name for tensor in self.taken}
        numbers = {name for name, _ in self.op.scalars}
        for place, (keyword, value) in enumerate(self.arguments):
            schema_name = keyword or ("self" if place == 0 else "other" if place == 1 else "")
            is_literal = isinstance(value, ast.Constant | ast.JoinedStr) or number_in(value) is not None
            if is_literal or (schema_name in numbers and schema_name not in names) or self._is_other_object(value):
                continue
            if left and (keyword is None or keyword in names):
                left -= 1
                yield value


def applied(node: ast.AugAssign, target: str, value: str) -> str:
    """Return what an augmented assignment computes, with these texts for what it changes and by what."""
    _, sign, _ = ast.unparse(ast.BinOp(ast.Name("x"), node.op, ast.Name("y"))).split()
    return f"{target} {sign} {value}"


def has_stars(call: ast.Call) -> bool:
    """Return True for `f(*given)` and `f(**given)`, which do not show how many arguments there are."""
    return any(isinstance(value, ast.Starred) for value in call.args) or any(not item.arg for item in call.keywords)


def operands(node: ast.BinOp, op: str, call: OpCall | None = None) -> tuple[ast.expr, ast.expr]:
    """Return the operands in the order in which torch's op takes them: x before 2 in `2 * x` and `1 - x`.

    If the `call` took one tensor alone, an attribute is the number: x before `self.scale` in `self.scale * x`.
    """
    is_alone = call is not None and len(call.inputs) == 1 and not isinstance(node.right, ast.Attribute | ast.Constant)
    is_number = number_in(node.left) is not None or (is_alone and isinstance(node.left, ast.Attribute))
    is_swapped = op in REFLECTED.values() or (op in _COMMUTES and is_number)
    return (node.right, node.left) if is_swapped else (node.left, node.right)


def root_of(node: ast.expr) -> ast.expr | None:
    """Return what an expression is the square of, as it is written: `x * x`, `x ** 2`, `x.pow(2)` or `x.square()`."""
    if isinstance(node, ast.BinOp):
        is_product = isinstance(node.op, ast.Mult) and ast.dump(node.left) == ast.dump(node.right)
        return node.left if is_product or (isinstance(node.op, ast.Pow) and number_in(node.right) == 2) else None
    if not isinstance(node, ast.Call) or name_called(node) not in ("pow", "square"):
        return None
    taken = [*node.args, *(item.value for item in node.keywords)]
    if isinstance(node.func, ast.Attribute) and len(taken) == (name_called(node) == "pow"):
        taken = [node.func.value, *taken]
    is_square = bool(taken) and (name_called(node) == "square" or number_in(taken[-1]) == 2)
    return taken[0] if is_square else None


_MODULES_OF_NUMBERS = frozenset({"math", "np", "numpy", "torch"})
_ARITHMETIC: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def number_in(node: ast.AST) -> float | None:
    """Return the value of a constant expression, else None: `-1e-8`, `2 ** -24`, `math.sqrt(2 * math.pi)`."""
    try:
        number = _evaluate(node)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return number if isinstance(number, float) else None


def _evaluate(node: ast.AST) -> float:  # noqa: PLR0911 - a table of forms
    """Evaluate a constant expression; raises TypeError for anything else."""
    match node:
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate(node.operand)
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        case ast.Attribute(attr="inf"):
            return math.inf
        case ast.Attribute(value=ast.Name(id=module), attr="pi" | "e" as name) if module in _MODULES_OF_NUMBERS:
            return float(getattr(math, name))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as text)]):
            return float(text)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="sqrt" | "log" | "exp" as name)):
            return float(getattr(math, name)(*map(_evaluate, node.args)))
    raise TypeError
