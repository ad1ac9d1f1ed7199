"""Rewrite a logarithm or a quotient in log space: sums and differences, which neither overflow nor round to 0.

The forms that people write are known: log of softmax or sigmoid and of 1 minus it, log of a sum of exponentials, of
their products and quotients, of 1 minus an exponential, of cosh and of 1 minus the square of tanh, a softplus, a
sigmoid or a softmax by hand. A name stands for its definition in the same function, if that is certain. Only names and
the form of the code are read here: the run with the new text has to show that it means the same.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal

from nandoctor.changes.definitions import Definitions
from nandoctor.changes.editor import HAS_EFFECTS, Editor
from nandoctor.changes.expression import OPERATORS, Expression, number_in, operands, root_of
from nandoctor.changes.places import ancestors, dims_of, maker_of, place_of
from nandoctor.changes.source_tree import (
    CannotWriteError,
    as_part,
    grouped,
    name_called,
    names_in,
    negated,
    on_one_line,
    parse_expression,
)
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import CASTS, CLAMPS, DIVISIONS, MAXIMA, MOVES

_UNTRACED_CASTS = frozenset({"float", "double", "clone", "contiguous"}) | CASTS
_PUTS_ZEROS = frozenset({"dropout", "pad", "constant_pad_nd"})  # applied to a logarithm, they put 0 instead of -inf
_MOVES = (MOVES - _PUTS_ZEROS) | {"diagonal", "masked_select", "index_select", "take_along_dim", "swapaxes"}
_MOVES_AND_CASTS = _MOVES | _UNTRACED_CASTS
_DIVIDES = frozenset({"div", "divide", "true_divide"})
_STEPS = 4
_NORMAL = "torch.special.log_ndtr({} * {:.8g}) + " + f"{math.log(2):.8g}"
"""log(1 + erf(x)), with the square root of 2; log(1 - erf(x)) with the negative one."""
_LOGS = {
    "expm1": "{x} + torch.log(-torch.expm1({negated}))",  # of a large exp(x) - 1, as in the inverse of a softplus
    "sigmoid": "{F}.logsigmoid({x})",
    "cosh": f"torch.logaddexp({{x}}, {{negated}}) - {math.log(2):.8g}",
    "i0": "torch.log(torch.special.i0e({x})) + {grouped}.abs()",
    "erfc": _NORMAL.format("{grouped}", -math.sqrt(2)),
}
"""The logarithms of what these ops make of x."""
_LOGS_OF_REST = {"exp": "torch.log(-torch.expm1({x}))", "sigmoid": "{F}.logsigmoid({negated})", "erf": _LOGS["erfc"]}
"""The logarithms of 1 minus that."""
_OF_TERMS = frozenset({"pow", "square", "reciprocal", "sum", "mean", "cumsum", "prod"})
"""Ops whose results have a logarithm that is made of those of the terms."""
_BINDS_LOOSELY = (ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda)
_FUNCTIONAL = ("import torch.nn.functional as F\n", "from torch.nn import functional as F\n")


@kind_of_change
class StableLog(SingleEdit):
    """Rewrite a logarithm or quotient at a site without its exponential or probability.

    log(softmax) becomes log_softmax, log(sum(exp)) logsumexp, exp / sum(exp) softmax. The engine cannot apply it to a
    run, so it is tried as text.
    """

    why: ClassVar[str] = "The result is computed without the number that rounds to 0 or overflows."
    is_text_alone: ClassVar[bool] = True

    kind: Literal["stable-log"] = "stable-log"
    site: OpSite

    @property
    def title(self) -> str:
        site = self.site
        what = "the quotient" if site.op in DIVISIONS else "the logarithm"
        return f"Compute {what} in {place_of(site) or site.op} in log space"

    def write(self, source: SourceWriter) -> None:
        expression = source.open(self.site)
        space = _LogSpace(expression.editor, expression.node, source.ops)
        if self.site.op in DIVISIONS:
            space.write_ratio(expression.node)
        else:
            space.write_logs(expression.node)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """The text of a logarithm; `is_low` if it may be in half precision, `is_partial` if it exists for some x alone.

    If it is the logsumexp over `dims` of a text, `terms` is that text; with `dims` None it is the softplus of `terms`.
    `terms` is "" for any other logarithm.
    """

    text: str
    is_low: bool = False
    is_partial: bool = False
    terms: str = ""
    dims: tuple[str, ...] | None = None

    @property
    def wide(self) -> str:
        """The text cast to fp32, for a function that autocast runs in its input's format."""
        return f"{grouped(self.text)}.float()" if self.is_low else self.text


_Form = Callable[[ast.expr], _Log | None]


class _LogSpace:
    """A writer of stable logarithms in one function; new names differ from those of other changes of its file."""

    def __init__(self, change: Editor, node: ast.AST, ops: Sequence[OpCall]) -> None:
        self._change, self._tree = change, change.tree
        self._ops = ops
        self._definitions = Definitions(change, node)
        own = (op for op in ops if op.forward is None)  # those of a derivative are at the line of its function
        # The last op of each expression: autocast's casts come before it.
        self._calls: dict[ast.AST, OpCall] = {
            item: op for item, op in change.calls(own) if self._definitions.has(item, change)
        }
        self._place: ast.AST = node
        self._hoisted: dict[ast.AST, tuple[str, str]] = {}
        self._sources: set[ast.AST] = set()
        self._functional = "F" if any(line in change.tree.text for line in _FUNCTIONAL) else "torch.nn.functional"

    def write_logs(self, node: ast.AST) -> None:
        """Write the logarithm at a node, and take out the assignments that are unread then.

        Other logarithms in its statement, and those of the same exponential or probability, are replaced too, since
        another batch may fail there.
        """
        logs = {item: call for item, call in self._calls.items() if call.op in ("log", "log1p")}
        text = self._write_log(node, logs.pop(node)) if node in logs else None
        if text is None:
            raise CannotWriteError
        texts = {node: text}
        sources, statement = set(self._sources), self._tree.statement_of(node)
        for item, call in logs.items():
            kept = dict(self._hoisted), dict(self._definitions.passed)
            self._sources = set()
            text = self._write_log(item, call)
            is_near = self._tree.statement_of(item) is statement is not None or sources & self._sources
            if text is not None and is_near:
                texts[item] = text
            else:
                self._hoisted, self._definitions.passed = kept
        self._change_texts(texts)

    def write_ratio(self, node: ast.AST) -> None:
        """Write a quotient as exp of a difference, and take out the assignments that are unread then."""
        quotient = Expression(self._change, node, self._calls.get(node), "div")
        is_call = name_called(node) in _DIVIDES and len(quotient.texts_after_first()) == 1  # a third one rounds
        if not (is_call or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))):
            raise CannotWriteError
        numerator, divisor = quotient.argument_node("self"), quotient.argument_node("other")
        log = self._log_of(divisor)
        if log is None:
            raise CannotWriteError
        self._change_texts({node: self._share(numerator, log)})

    def _share(self, numerator: ast.expr, divisor: _Log) -> str:
        """Return the text of a quotient: a sigmoid or softmax by hand, or any other; of two powers, a difference."""
        if isinstance(numerator, ast.BinOp) and (shares := self._shares_of_sides(numerator, divisor)):
            return shares
        is_softplus = divisor.terms and divisor.dims is None
        if number_in(numerator) == 1 and is_softplus:
            return f"torch.sigmoid({negated(divisor.terms)})"
        log = self._log_of(numerator)
        if log is None:
            inverse = f"sigmoid({negated(divisor.terms)})" if is_softplus else f"exp({negated(divisor.wide)})"
            return f"{grouped(self._change.code(numerator))} * torch.{inverse}"
        if log.text == divisor.terms and divisor.dims is None:
            return f"torch.sigmoid({log.text})"
        dims = [text for text in divisor.dims or () if not text.startswith("keepdim")]
        if log.text == divisor.terms and len(dims) == 1 and len(divisor.dims or ()) == 2:
            return f"torch.softmax({log.text}, {dims[0]})"
        return f"torch.exp({log.wide} - {grouped(divisor.text)})"

    def _shares_of_sides(self, numerator: ast.BinOp, divisor: _Log) -> str:
        """Return the text of a quotient by the parts of its numerator, one of which is a power; "" if none is."""
        left, right = numerator.left, numerator.right
        powers = [side for side in (right, left) if self._log_of(side) is not None]
        if isinstance(numerator.op, ast.Sub) and powers:
            return f"{self._share(left, divisor)} - {self._share(right, divisor)}"
        if isinstance(numerator.op, ast.Mult) and len(powers) == 1:
            factor = self._change.operand(left if powers[0] is right else right)
            return f"{factor} * {self._share(powers[0], divisor)}"
        return ""

    def _change_texts(self, texts: Mapping[ast.AST, str]) -> None:
        """Replace nodes by their texts, after what these read is provided; remove what nothing reads any more."""
        read = {name for text in texts.values() for name in names_in(parse_expression(text))}
        for node, (name, code) in self._hoisted.items():
            if not self._change.is_replaced(node):
                self._change.replace(node, name, (f"{name} = {code}",))
        for node, text in texts.items():
            if not self._change.is_replaced(node):
                self._change.replace(node, text)
        self._definitions.remove_unread(texts, read)

    def _write_log(self, node: ast.AST, call: OpCall) -> str | None:
        self._place = node
        made = None
        with suppress(CannotWriteError):
            taken = Expression(self._change, node, call).argument_node("self")
            if call.op == "log":
                made = self._log_of(taken)
            elif isinstance(taken, ast.UnaryOp) and isinstance(taken.op, ast.USub):
                made = self._log_of_rest(taken.operand)
            elif (exponent := self._log_of(taken)) is not None:
                made = self._softplus_of(exponent)
        if made is None:
            return None
        is_given = isinstance(parse_expression(made.text), ast.Name | ast.Attribute | ast.Subscript)
        is_term = isinstance(self._tree.parent(node), ast.BinOp)  # else it may be written to later
        return f"{made.text}.clone()" if is_given and not (made.is_low or is_term) else made.wide

    def _log_of(self, node: ast.expr) -> _Log | None:
        """Return the logarithm of an expression, None if no better form of it is known."""
        node = self._definitions.resolved(node)
        if isinstance(node, ast.Attribute) and node.attr == "probs":  # of one of torch's distributions
            taken = self._calls[self._place].inputs[0]
            if any(op.op == "softmax" for op in ancestors(self._ops, taken, _STEPS, through=_MOVES)):
                return _Log(text=f"{self._change.code(node.value)}.logits")
        name, expression = self._named_op(node)
        if name in self._forms:
            return self._forms[name](expression)
        if name in _MOVES_AND_CASTS:
            return self._moved(node, name, expression, self._log_of)
        return self._of_operator(node, name) if isinstance(node, ast.BinOp) else None

    @cached_property
    def _forms(self) -> Mapping[str, Callable[[Expression], _Log | None]]:
        return {
            **{name: partial(self._filled, form) for name, form in _LOGS.items()},
            **{name: partial(self._of_terms, name) for name in _OF_TERMS},
            "exp": lambda expression: self._leaf(expression.argument_node("self")),
            "softmax": self._of_softmax,
        }

    def _of_operator(self, node: ast.BinOp, name: str) -> _Log | None:
        if name in ("mul", "div"):
            return self._joined(node, "+" if name == "mul" else "-")
        if name == "add":
            return self._added(node)
        if name in ("sub", "rsub") and number_in(node.left) == 1:
            return self._log_of_rest(node.right)
        inner, of_power = self._named_op(self._definitions.resolved(node.left))
        if name != "sub" or inner != "exp":
            return None
        form = _LOGS["expm1"]
        if number_in(node.right) != 1:
            form = f"{{x}} + torch.log1p(-{grouped(self._leaf(node.right).text)} * torch.exp({{negated}}))"
        return self._filled(form, of_power, is_partial=True)

    def _of_softmax(self, expression: Expression) -> _Log:
        logit, dims = self._leaf(expression.argument_node("self")), expression.texts_after_first()
        if not dims:  # an nn.Softmax has its own dim
            assert expression.op is not None
            dims = [f"dim={dims_of(expression.op)}"]
        return _Log(text=f"torch.log_softmax({', '.join([logit.text, *dims])})")

    def _filled(self, form: str, expression: Expression, *, is_partial: bool = False) -> _Log:
        """Return one of the `_LOGS` with the op's argument."""
        times = len(re.findall(r"\{(x|negated|grouped)\}", form))
        x = self._leaf(expression.argument_node("self"), times=times).wide
        text = form.format(x=x, negated=negated(x), grouped=grouped(x), F=self._functional)
        return _Log(text=text, is_partial=is_partial or "expm1" in form)

    def _log_of_rest(self, node: ast.expr) -> _Log | None:
        """Return the logarithm of 1 minus an expression."""
        node = self._definitions.resolved(node)
        name, expression = self._named_op(node)
        if name in _MOVES_AND_CASTS:
            return self._moved(node, name, expression, self._log_of_rest)
        if name in _LOGS_OF_REST:
            return self._filled(_LOGS_OF_REST[name], expression)
        if name in ("sub", "rsub") and isinstance(node, ast.BinOp) and number_in(node.left) == 1:
            return self._log_of(node.right)
        root, of_root = self._named_op(self._definitions.resolved(root_of(node) or node))
        return self._filled(f"-2 * ({_LOGS['cosh']})", of_root) if root == "tanh" else None

    def _moved(self, node: ast.expr, name: str, expression: Expression, form: _Form) -> _Log | None:
        """Return the form of what an op only moves or casts, moved in the same way."""
        subject = expression.argument_node("self")
        made = form(subject)
        if made is None or name in _UNTRACED_CASTS:
            return made
        self._require_unbound(expression, subject)
        text = self._change.code(node, {subject: grouped(made.text)})
        return _Log(text=text, is_low=made.is_low, is_partial=made.is_partial)

    def _require_unbound(self, expression: Expression, subject: ast.expr) -> None:
        """Refuse an expression whose other arguments may have another value at the logarithm."""
        others = [value for _, value in expression.arguments if value is not subject]
        others += [expression.node.slice] if isinstance(expression.node, ast.Subscript) else []
        if any(self._definitions.is_bound_between(value, self._place) for value in others):
            raise CannotWriteError

    def _term_of(self, node: ast.expr) -> _Log | None:
        """Return the logarithm of a part of an expression, which has a value where that of the part may have none."""
        log = self._log_of(node)
        return None if log is None or log.is_partial else log

    def _of_terms(self, name: str, expression: Expression) -> _Log | None:
        """Return the logarithm of what one of the ops `_OF_TERMS` makes."""
        subject = expression.argument_node("self")
        log = self._term_of(subject)
        if log is None:
            return None
        self._require_unbound(expression, subject)
        if name in ("pow", "square"):
            times = "2" if name == "square" else as_part(expression.argument("exponent"))
            return _Log(text=f"{times} * {grouped(log.wide)}")
        dims = expression.texts_after_first()
        given = [log.wide, *dims] if dims else [f"{grouped(log.wide)}.flatten()", "0"]
        along, total = ", ".join(dims), f"torch.logsumexp({', '.join(given)})"
        if name == "sum":
            return _Log(text=total, terms=log.text, dims=tuple(dims))
        texts = {
            "reciprocal": negated(log.wide),
            "cumsum": f"torch.logcumsumexp({log.wide}, {along})",
            "prod": f"{grouped(log.wide)}.sum({along})",
            "mean": f"{total} - torch.log(torch.ones_like({log.text}).sum({along}))",
        }
        return _Log(text=texts[name])

    def _joined(self, node: ast.BinOp, sign: str) -> _Log | None:
        logs = self._logs_of_sides(node)
        if logs is None:
            return None
        left, right = logs
        if left.text == "0":
            return _Log(text=right.text if sign == "+" else negated(right.text), is_low=right.is_low)
        if right.text == "0":
            return left
        closed = grouped(right.text) if sign == "-" else right.text
        return _Log(text=f"{left.wide} {sign} {closed}")

    def _logs_of_sides(self, node: ast.BinOp) -> tuple[_Log, _Log] | None:
        """Return the logarithms of both operands; None if neither has a better form, or one may be negative."""
        better = [self._term_of(side) for side in (node.left, node.right)]
        if not any(better):
            return None
        sides = zip(better, (node.left, node.right), strict=True)
        left, right = (log or self._log_of_positive(side, node) for log, side in sides)
        return None if left is None or right is None else (left, right)

    def _log_of_positive(self, side: ast.expr, node: ast.BinOp) -> _Log | None:
        """Return the logarithm of a positive number, or the plain one of an operand that no batch makes 0 or negative.

        Or that of a mask of flags. Another number may be negative in the next batch.
        """
        if (number := number_in(side)) is not None:
            return _Log(text="0" if number == 1 else f"{math.log(number):.8g}") if number > 0 else None
        call = self._calls.get(node)
        is_first = call is not None and operands(node, call.op)[0] is side
        taken = call.find_input("self" if is_first else "other") if call is not None else None
        if taken is None or taken.stats is None:
            return None
        maker, low = maker_of(taken, self._ops), taken.stats.min
        is_positive = low is not None and low > 0 and is_nonnegative(taken, self._ops, nor_zero=True)
        # A mask's -Inf ends in the sum of exponentials, and it has no gradient. Data of 0 and 1 may be rewards.
        is_mask = maker is not None and maker.op in CASTS and all(given.is_flags for given in maker.inputs)
        return _Log(text=f"torch.log({self._leaf(side).text})") if is_positive or is_mask else None

    def _added(self, node: ast.BinOp) -> _Log | None:
        """Return the logarithm of a sum of two: a number and an exponential, or two exponentials."""
        for side, other in ((node.left, node.right), (node.right, node.left)):
            if (number := number_in(side)) is not None:
                name, expression = self._named_op(self._definitions.resolved(other))
                if name == "erf" and number == 1:
                    return self._filled(_NORMAL.format("{grouped}", math.sqrt(2)), expression)
                log = self._term_of(other) if number > 0 else None
                if log is None or number == 1:
                    return log and self._softplus_of(log)
                there, back = ("-", "+") if number > 1 else ("+", "-")
                shift = f"{abs(math.log(number)):.8g}"
                return _Log(text=f"{self._functional}.softplus({log.wide} {there} {shift}) {back} {shift}")
        logs = self._logs_of_sides(node)
        return None if logs is None else _Log(text=f"torch.logaddexp({logs[0].wide}, {logs[1].wide})")

    def _softplus_of(self, exponent: _Log) -> _Log:
        """Return log(1 + exp(exponent))."""
        return _Log(text=f"{self._functional}.softplus({exponent.wide})", terms=exponent.text)

    def _leaf(self, node: ast.expr, *, times: int = 1) -> _Log:
        """Return the text of an expression at the logarithm, which reads it `times` times; a call is made once."""
        self._sources.add(node)
        has_effects = any(isinstance(below, HAS_EFFECTS) for below in ast.walk(node))
        is_inside = self._place in self._tree.ancestors(node)
        is_elsewhere = not is_inside and (has_effects or self._definitions.is_bound_between(node, self._place))
        if is_elsewhere or (has_effects and times > 1):
            return self._hoist(node)
        code = self._change.code(node)
        return _Log(text=f"({code})" if isinstance(node, _BINDS_LOOSELY) else code, is_low=self._is_low(node))

    def _hoist(self, node: ast.expr) -> _Log:
        """Return a name for an expression, which is assigned before its statement."""
        if self._tree.statement_of(node) is None:
            raise CannotWriteError
        code = self._change.code(node)
        if self._change.is_replaced(node):  # another change of the function has named it
            return _Log(text=code, is_low=self._is_low(node))
        if node not in self._hoisted:
            self._hoisted[node] = self._change.new_name("logits", node), on_one_line(code)
        return _Log(text=self._hoisted[node][0], is_low=self._is_low(node))

    def _is_low(self, node: ast.expr) -> bool:
        """Return True if the op that takes this expression took it in half precision."""
        parent = next((item for item in self._tree.ancestors(node) if item in self._calls), None)
        taken = self._calls[parent].inputs[:1] if parent is not None else ()
        return any(tensor.stats is not None and tensor.stats.dtype in (FP16, BF16) for tensor in taken)

    def _named_op(self, node: ast.expr) -> tuple[str, Expression]:
        """Return the op of an expression, from the trace or, if it called none there, from its spelling."""
        call = self._calls.get(node)
        if call is not None:
            takes_diagonal = call.op == "diag" and len(call.outputs[0].shape) == 1  # from a vector, diag makes zeros
            return "diagonal" if takes_diagonal else call.op, Expression(self._change, node, call)
        name = OPERATORS.get(type(node.op), "") if isinstance(node, ast.BinOp) else ""
        if isinstance(node, ast.Subscript):
            name = "select"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr if node.func.attr in _MOVES_AND_CASTS else ""
        return name, Expression(self._change, node, None, name)


_POSITIVE = frozenset("exp exp2 softmax sigmoid softplus cosh".split())
_NEVER_NEGATIVE = frozenset(
    """abs square relu relu6 sqrt rsqrt acos acosh norm linalg_vector_norm
    linalg_norm linalg_matrix_norm frobenius_norm nuclear_norm var std cdist pairwise_distance dist mse_loss l1_loss
    smooth_l1_loss huber_loss""".split()
)
_KEEPS_NONNEGATIVE = frozenset(
    """sum nansum mean nanmean amax amin max min cumsum prod cumprod mul div add reciprocal pow log1p expm1 median
    maximum minimum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    max_pool1d max_pool2d max_pool3d matmul mm bmm outer einsum""".split()
)
"""Ops whose result is non-negative if all their inputs are."""
_FACTORS = frozenset({"other", "alpha", "value", "min"})
_DEPTH = 16


def is_nonnegative(tensor: OpTensor, ops: Sequence[OpCall], depth: int = _DEPTH, *, nor_zero: bool = False) -> bool:
    """Return True if no batch can make the tensor negative, `nor_zero` but by rounding; False in doubt."""
    op = maker_of(tensor, ops)
    if op is None or depth == 0:
        return False
    scalars = dict(op.scalars)
    is_square = (op.op == "pow" and scalars.get("exponent", 1.0) % 2 == 0) or _is_square(op, ops)
    if op.op in _POSITIVE or (not nor_zero and (is_square or op.op in _NEVER_NEGATIVE)):
        return True
    floats = [taken for taken in op.inputs if taken.stats is not None]
    proved = [is_nonnegative(taken, ops, depth - 1, nor_zero=nor_zero) for taken in floats]
    low = scalars.get("min", scalars.get("min_val", -1.0))
    bounds = [is_proved for taken, is_proved in zip(floats, proved, strict=True) if taken.name in ("min", "other")]
    if op.op in CLAMPS | MAXIMA and (any(bounds) or low > 0 or (low == 0 and not nor_zero)):
        return True
    moves = op.op in (MOVES | CASTS) - {"copy"}  # their other inputs are indices
    takes_all = moves or (op.op in _KEEPS_NONNEGATIVE and len(floats) == len(op.inputs))
    return takes_all and bool(proved) and all(proved) and all(scalars.get(name, 0.0) >= 0 for name in _FACTORS)


def _is_square(op: OpCall, ops: Sequence[OpCall]) -> bool:
    """Return True if the op multiplies a tensor by itself. Two outputs of one op, such as a split, are different."""
    if op.op != "mul" or len(op.inputs) != 2:
        return False
    one, other = op.inputs
    same = (one.producer, one.origin, one.path) == (other.producer, other.origin, other.path)
    if one.producer is None:
        return same and one.origin in ("weight", "buffer", "batch")
    return same and len(ops[one.producer].outputs) == 1
