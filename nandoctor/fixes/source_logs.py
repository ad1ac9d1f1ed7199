"""Writes logarithms and quotients of exponentials as sums and differences, which neither overflow nor round to 0.

A name stands for its definition in the same function, if that is certain. Only names and the form of the code are read
here: the run with the new text has to show that it means the same.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from nandoctor.changes.editor import HAS_EFFECTS, Editor
from nandoctor.changes.expression import Expression, number_in
from nandoctor.changes.source_tree import CannotWriteError, name_called, names_in
from nandoctor.changes.text_lines import grouped, is_closed, negated, on_one_line, parse_expression
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.evidence.trace import OpCall
from nandoctor.fixes.log_text import Log, even_log, excess_log, functional_in, slope_log, softplus_of
from nandoctor.fixes.source_definitions import Definitions, GivenProbabilities, calls_in
from nandoctor.fixes.source_shares import is_zero, sides_of_quotient
from nandoctor.ops import CASTS, GROWING_ON_BOTH_SIDES, MOVES

_OPERATORS: dict[type, str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_UNTRACED_CASTS = frozenset({"float", "double", "clone", "contiguous"}) | CASTS
_PUTS_ZEROS = frozenset({"dropout", "pad", "constant_pad_nd"})  # applied to a logarithm, they put 0 instead of -inf
_MOVES = (MOVES - _PUTS_ZEROS) | {"diagonal", "masked_select", "index_select", "take_along_dim", "swapaxes"}
_MOVES_AND_CASTS = _MOVES | _UNTRACED_CASTS
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isfinite", "logical_not", "logical_and", "logical_or"})
_MAKES_FLAGS = frozenset({"eye", "one_hot", "ones", "ones_like", "new_ones"})
_BINDS_LOOSELY = (ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda)
_Form = Callable[[ast.expr], Log | None]


class LogSpace:
    """A writer of stable logarithms in one function; new names differ from those of other changes of its file."""

    def __init__(self, change: Editor, node: ast.AST, ops: Sequence[OpCall]) -> None:
        tree, function = change.tree, change.tree.scope_of(node)
        if isinstance(function, ast.Module):
            raise CannotWriteError
        self._change, self._tree, self._function, self._ops = change, tree, function, ops
        self._definitions = Definitions(tree, function)
        self._calls = dict(calls_in(change, function, ops))
        self._place: ast.AST = node
        self._hoisted: dict[ast.AST, tuple[str, str]] = {}
        self._before: dict[ast.AST, dict[str, str]] = {}
        self._through: dict[ast.Assign, None] = {}
        self._sources: set[ast.AST] = set()
        self._probabilities, self._functional = GivenProbabilities(change), functional_in(tree.text)

    def write_logs(self, node: ast.AST, *, everywhere: bool) -> None:
        """Write the logarithm at a node, and take out the assignments that are unread then.

        Other logarithms in its statement, and those of the same exponential or probability, are replaced too, since
        another batch may fail there; with `everywhere`, all in the function are.
        """
        logs = {item: call for item, call in self._calls.items() if call.op in ("log", "log1p")}
        text = self._write_log(node, logs.pop(node)) if node in logs else None
        if text is None:
            raise CannotWriteError
        texts = {node: text}
        sources, statement = set(self._sources), self._tree.statement_of(node)
        for item, call in logs.items():
            kept = dict(self._hoisted), dict(self._through)
            self._sources = set()
            text = self._write_log(item, call)
            is_near = self._tree.statement_of(item) is statement is not None or sources & self._sources
            if text is not None and (everywhere or is_near):
                texts[item] = text
            else:
                self._hoisted, self._through = kept
        self._change_texts(texts)

    def write_ratio(self, node: ast.AST) -> None:
        """Write a quotient as exp of a difference, and take out the assignments that are unread then."""
        self._place = node
        numerator, divisor = sides_of_quotient(self._change, node, self._calls.get(node))
        log = self._log_of(divisor)
        if log is None:
            raise CannotWriteError
        self._change_texts({node: self._ratio(numerator, log)})

    def _ratio(self, numerator: ast.expr, divisor: Log) -> str:
        if isinstance(numerator, ast.BinOp) and isinstance(numerator.op, ast.Mult):
            for share, other in ((numerator.left, numerator.right), (numerator.right, numerator.left)):
                if self._log_of(numerator) is None and self._log_of(share) is not None:
                    return f"{grouped(self._change.code(other))} * {self._share(share, divisor)}"
        return self._share(numerator, divisor)

    def _share(self, numerator: ast.expr, divisor: Log) -> str:
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

    def _change_texts(self, texts: Mapping[ast.AST, str]) -> None:
        """Replace nodes by their texts, after what these read is provided; remove what nothing reads any more."""
        read = {name for text in texts.values() for name in names_in(parse_expression(text))}
        for node, (name, code) in self._hoisted.items():
            if not self._change.is_replaced(node):
                self._change.replace(node, name, (f"{name} = {code}",))
        for node, text in texts.items():
            if not self._change.is_replaced(node):
                self._change.replace(node, text, self._before.get(node, {}).values())
        self._probabilities.provide(texts)
        for statement in self._definitions.unread(self._through, texts, read):
            self._change.remove(statement)

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
                made = softplus_of(exponent, self._functional)
        if made is None:
            return None
        is_given = isinstance(parse_expression(made.text), (ast.Name, ast.Attribute, ast.Subscript))
        return f"{made.text}.clone()" if is_given and not made.is_low else made.wide

    def _log_of(self, node: ast.expr) -> Log | None:  # noqa: PLR0911 - a table
        """Return the logarithm of an expression, None if no better form of it is known."""
        node = self._probability_or(self._resolved(node))
        name, expression = self._named_op(node)
        if name in _MOVES_AND_CASTS:
            return self._moved(node, name, expression, self._log_of)
        if name == "exp":
            return self._leaf(expression.argument_node("self"))
        if name in ("masked_fill", "where"):
            return self._masked(node, expression, "self" if name == "masked_fill" else "other")
        if name in ("softmax", "sigmoid"):
            return self._of_probability(expression, name)
        if name in ("sum", "mean", "cumsum", "prod", "logsumexp"):
            return self._reduced(expression, name)
        if name in ("mul", "div", "reciprocal"):
            return self._joined(node, "+" if name == "mul" else "-")
        if name == "add":
            return self._added(node)
        if name in ("sub", "rsub") and isinstance(node, ast.BinOp) and number_in(node.left) == 1:
            return self._log_of_rest(node.right)
        if name == "expm1":
            return excess_log(self._leaf(expression.argument_node("self")))
        if name == "sub" and isinstance(node, ast.BinOp) and number_in(node.right) == 1:
            power, inner = self._named_op(self._resolved(node.left))
            return excess_log(self._leaf(inner.argument_node("self"))) if power == "exp" else None
        if name in GROWING_ON_BOTH_SIDES - {"sinh"}:
            return even_log(name, self._name(expression.argument_node("self")))
        if name == "sqrt":
            half = self._log_of(expression.argument_node("self"))
            return None if half is None else Log(text=f"0.5 * {grouped(half.text)}", is_low=half.is_low)
        return None

    def _masked(self, node: ast.expr, expression: Expression, argument: str) -> Log | None:
        """Return the logarithm of an expression in which a mask puts 0."""
        kept, put = expression.argument_node(argument), expression.argument_node("value")
        if argument == "other" and is_zero(kept):
            kept, put = put, kept
        log = self._log_of(kept) if is_zero(put) else None
        if log is None or not self._is_known_here(node, without=kept):
            return None
        return Log(text=self._change.code(node, {kept: grouped(log.text), put: "-torch.inf"}), is_low=log.is_low)

    def _of_probability(self, expression: Expression, name: str) -> Log:
        logit = self._leaf(expression.argument_node("self"))
        if name == "sigmoid":
            return Log(text=f"{self._functional}.logsigmoid({logit.wide})")
        dims = expression.texts_after_first()
        if not dims:  # an nn.Softmax has its own dim
            assert expression.op is not None
            dims = [f"dim={value:g}" for key, value in expression.op.scalars if key == "dim"]
        return Log(text=f"torch.log_softmax({', '.join([logit.text, *dims])})")

    def _log_of_rest(self, node: ast.expr) -> Log | None:
        """Return the logarithm of 1 minus an expression."""
        node = self._probability_or(self._resolved(node))
        name, expression = self._named_op(node)
        if name in _MOVES_AND_CASTS:
            return self._moved(node, name, expression, self._log_of_rest)
        if name == "sigmoid":
            logit = self._leaf(expression.argument_node("self"))
            return Log(text=f"{self._functional}.logsigmoid({negated(logit.wide)})")
        if name == "pow" and expression.op is not None and ("exponent", 2.0) in expression.op.scalars:
            name, squared = self._named_op(self._resolved(expression.argument_node("self")))
            return slope_log(self._name(squared.argument_node("self")), self._functional) if name == "tanh" else None
        if name == "exp":
            return Log(text=f"torch.log(-torch.expm1({self._leaf(expression.argument_node('self')).wide}))")
        if name in ("sub", "rsub") and isinstance(node, ast.BinOp) and number_in(node.left) == 1:
            return self._log_of(node.right)
        return None

    def _moved(self, node: ast.expr, name: str, expression: Expression, form: _Form) -> Log | None:
        """Return the form of what an op only moves or casts, moved in the same way."""
        subject = expression.argument_node("self")
        made = form(subject)
        if made is None or name in _UNTRACED_CASTS:
            return made
        if not self._is_known_here(node, without=subject):
            raise CannotWriteError
        text = self._change.code(node, {subject: grouped(made.text)})
        return Log(text=text, is_low=made.is_low)

    def _reduced(self, expression: Expression, name: str) -> Log | None:
        log = self._log_of(expression.argument_node("self"))
        if log is None or name == "logsumexp":
            return None
        dims = expression.texts_after_first()
        if not self._is_known_here(expression.node, without=expression.argument_node("self")):
            raise CannotWriteError
        if name == "prod":
            return Log(text=f"{grouped(log.text)}.sum({', '.join(dims)})")
        if name == "cumsum":
            return Log(text=f"torch.logcumsumexp({', '.join([log.wide, *dims])})")
        if name == "mean" and not log.text.isidentifier():  # its size is read as well
            log = self._named_before(log, "logits")
        given = [log.wide, *dims] if dims else [f"{grouped(log.wide)}.flatten()", "0"]
        text = f"torch.logsumexp({', '.join(given)})"
        if name == "sum":
            return Log(text=text, terms=log.text, dims=tuple(dims))
        dim = next((text.removeprefix("dim=") for text in dims if not text.startswith("keepdim")), None)
        size = f"{log.text}.numel()" if dim is None else f"{log.text}.shape[{dim}]"
        count = f"math.log({size})" if "math" in self._tree.global_imports else f"torch.tensor({size}).log()"
        return Log(text=f"{text} - {count}")

    def _joined(self, node: ast.expr, sign: str) -> Log | None:
        """Return the logarithm of a product or a quotient."""
        if not isinstance(node, ast.BinOp):
            return None
        logs = self._logs_of_sides(node)
        if logs is None:
            return None
        left, right = logs
        if left.text == "0":
            return Log(text=right.text if sign == "+" else negated(right.text), is_low=right.is_low)
        if right.text == "0":
            return left
        closed = grouped(right.text) if sign == "-" else right.text
        return Log(text=f"{left.wide} {sign} {closed}")

    def _logs_of_sides(self, node: ast.BinOp) -> tuple[Log, Log] | None:
        """Return the logarithms of both operands; None if neither has a better form, or one may be negative."""
        logs = {side: self._log_of(side) for side in (node.left, node.right)}
        if not any(logs.values()) or not all(log or self._is_mask(node, side) for side, log in logs.items()):
            return None
        left, right = (log or self._plain_log(side) for side, log in logs.items())
        return left, right

    def _is_mask(self, node: ast.BinOp, side: ast.expr) -> bool:
        """Return True if an operand is a positive number or a mask: any other may be negative in the next batch."""
        if (number := number_in(side)) is not None:
            return number > 0
        call = self._calls.get(node)
        taken = call.inputs[-1 if side is node.right else 0].stats if call is not None and call.inputs else None
        if taken is None:
            return self._is_mask_expression(side, is_flags=False)
        if taken.min is None or taken.min < 0 or not taken.p05 == taken.max == 1:
            return False  # a mask's non-zero values are all 1, and so is their 5 % quantile
        return self._is_mask_expression(side, is_flags=taken.min == 0)

    def _is_mask_expression(self, node: ast.expr, *, is_flags: bool) -> bool:
        """Return True for a comparison or, if `is_flags`, an argument; also if moved, cast or subtracted from 1."""
        node = self._resolved(node)
        name, expression = self._named_op(node)
        if isinstance(node, ast.BinOp):
            is_rest = isinstance(node.op, ast.Sub) and number_in(node.left) == 1
            return is_rest and self._is_mask_expression(node.right, is_flags=is_flags)
        made_by = name_called(node)
        if name in _MOVES_AND_CASTS or made_by in ("tril", "triu"):
            return self._is_mask_expression(expression.argument_node("self"), is_flags=is_flags)
        is_made = made_by in _MAKES_FLAGS or (is_flags and isinstance(node, ast.Name))
        return is_made or isinstance(node, ast.Compare) or name in _COMPARISONS

    def _added(self, node: ast.expr) -> Log | None:
        """Return the logarithm of a sum of two: 1 and an exponential, or two exponentials."""
        if not isinstance(node, ast.BinOp):
            return None
        for number, other in ((node.left, node.right), (node.right, node.left)):
            if number_in(number) is not None:
                log = self._log_of(other)
                return softplus_of(log, self._functional) if log is not None and number_in(number) == 1 else None
        logs = self._logs_of_sides(node)
        return None if logs is None else Log(text=f"torch.logaddexp({logs[0].wide}, {logs[1].wide})")

    def _plain_log(self, node: ast.expr) -> Log:
        number = number_in(node)
        if number is not None:
            if number <= 0:
                raise CannotWriteError
            shown = f"math.log({self._change.code(node)})" if "math" in self._tree.global_imports else None
            return Log(text="0" if number == 1 else shown or f"{math.log(number):.8g}")
        text = self._leaf(node).text
        return Log(text=f"torch.log({text[1:-1] if is_closed(text) else text})")

    def _leaf(self, node: ast.expr) -> Log:
        """Return the text of an expression as it can be read at the logarithm; a call in it is made only once."""
        if self._tree.scope_of(node) is not self._function:
            return Log(text=self._probabilities.name_of(node), is_low=self._is_low(node))
        self._sources.add(node)
        has_effects = any(isinstance(below, HAS_EFFECTS) for below in ast.walk(node))
        if not (self._place in self._tree.ancestors(node) if has_effects else self._is_known_here(node)):
            return self._hoist(node)
        code = self._change.code(node)
        is_loose = isinstance(node, _BINDS_LOOSELY)
        return Log(text=f"({code})" if is_loose else code, is_low=self._is_low(node))

    def _name(self, node: ast.expr) -> Log:
        """Return the text of an expression that is read twice: a new name for it, unless it is a name."""
        is_name = isinstance(parse_expression(self._leaf(node).text), (ast.Name, ast.Attribute))
        return self._leaf(node) if is_name else self._hoist(node)

    def _hoist(self, node: ast.expr) -> Log:
        """Return a name for an expression, which is assigned before its statement."""
        is_view = isinstance(node, (ast.Name, ast.Attribute)) or self._named_op(node)[0] in _MOVES_AND_CASTS
        if self._tree.statement_of(node) is None or (is_view and self._definitions.is_written_into(node)):
            raise CannotWriteError
        code = self._change.code(node)
        if self._place in self._tree.ancestors(node):  # the logarithm around it is rewritten as a whole
            return self._named_before(Log(text=code, is_low=self._is_low(node)), "value")
        if node not in self._hoisted:
            name = self._change.new_name("logits", node)
            self._hoisted[node] = name, on_one_line(code)
        return Log(text=self._hoisted[node][0], is_low=self._is_low(node))

    def _named_before(self, log: Log, wanted: str) -> Log:
        """Return a name for a value, which is assigned before the rewritten statement."""
        if self._tree.statement_of(self._place) is None:
            raise CannotWriteError
        name = self._change.new_name(wanted, self._place)
        self._before.setdefault(self._place, {})[name] = f"{name} = {log.text}"
        return Log(text=name, is_low=log.is_low)

    def _is_low(self, node: ast.expr) -> bool:
        """Return True if the op that takes this expression took it in half precision."""
        parent = next((item for item in self._tree.ancestors(node) if item in self._calls), None)
        taken = self._calls[parent].inputs[:1] if parent is not None else ()
        return any(tensor.stats is not None and tensor.stats.dtype in (FP16, BF16) for tensor in taken)

    def _is_known_here(self, node: ast.AST, without: ast.AST | None = None) -> bool:
        """Return True if an expression means the same at the logarithm; the part `without` may be different there."""
        if without is None:
            return self._place in self._tree.ancestors(node) or self._definitions.means_the_same(node, self._place)
        return all(
            child is without or self._is_known_here(child, without if without in ast.walk(child) else None)
            for child in placed_below(node)
        )

    def _resolved(self, node: ast.expr) -> ast.expr:
        while isinstance(node, ast.Name) and (value := self._definitions.value_of(node)) is not None:
            self._through[next(item for item in self._tree.ancestors(value) if isinstance(item, ast.Assign))] = None
            node = value
        return node

    def _probability_or(self, node: ast.expr) -> ast.expr:
        """Return the probability that the function's only call passes for a parameter; else the node itself."""
        given = self._probabilities.value_of(node, self._ops) if isinstance(node, ast.Name) else None
        if given is None:
            return node
        self._calls[given[0]] = given[1]
        return given[0]

    def _named_op(self, node: ast.expr) -> tuple[str, Expression]:
        """Return the op of an expression, from the trace or, if it called none there, from its spelling."""
        call = self._calls.get(node)
        if call is not None:
            takes_diagonal = call.op == "diag" and len(call.outputs[0].shape) == 1  # from a vector, diag makes zeros
            return "diagonal" if takes_diagonal else call.op, Expression(self._change, node, call)
        name = _OPERATORS.get(type(node.op), "") if isinstance(node, ast.BinOp) else ""
        if isinstance(node, ast.Subscript):
            name = "select"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            name = name if name in _MOVES_AND_CASTS else ""
        return name, Expression(self._change, node, None, name)


def placed_below(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes directly below one that have a place in the text."""
    for child in ast.iter_child_nodes(node):
        if hasattr(child, "lineno"):
            yield child
        else:
            yield from placed_below(child)
