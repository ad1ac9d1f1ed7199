"""Clamp an op's argument or its result: to bounds, off zero, or where it is NaN."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

from nandoctor.changes.expression import Expression, has_stars
from nandoctor.changes.places import ancestors, in_place
from nandoctor.changes.running_op import RunningOp, is_tensor
from nandoctor.changes.source_tree import FUNCTIONS, CannotWriteError, grouped, name_called
from nandoctor.changes.source_writer import SourceWriter, edges_kept_off
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.evidence.formats import FORMATS
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CASTS, CLAMPS, DIVISIONS, EXPONENTIALS, MAXIMA, MOVES, SPREADS
from nandoctor.text import constant
from nandoctor.trees import tree_map

_BINARY = frozenset({"add", "sub", "mul", "div"})


@kind_of_change
class ClampArgument(SingleEdit):
    """Clamp an op's tensor argument to [low, high]; None leaves that side open.

    An `argument` of "" stands for the op's result. With `keeps_sign`, only values nearer to zero than `low` become
    `low`. With `nan`, `fill` replaces NaN and Inf in the argument, or NaN in a result of arguments without.
    """

    size: ClassVar[int] = 2
    is_inner: ClassVar[bool] = True

    kind: Literal["clamp"] = "clamp"
    site: OpSite
    argument: str
    low: float | None = None
    high: float | None = None
    nan: bool = False
    fill: float = 0.0
    keeps_sign: bool = False

    @property
    def title(self) -> str:
        what = _argument_in_words(self.site.op, self.argument)
        op = "the cast" if self.site.op in CASTS else self.site.op
        if self.nan and self.argument:
            done = f"Use 0 for NaN and Inf in {what} of {op}, which are left out later"
        elif self.nan:
            done = f"Use 0 where {op} has no value"
        elif self.keeps_sign and self.low == 1:
            done = f"Replace {what} of {op} by 1 where it is 0"
        elif self.keeps_sign and self.low is not None:
            done = f"Keep {what} of {op} at least {constant(self.low)} away from 0"
        else:
            done = f"Clamp {what} of {op} to {self._bounds_in_words()}"
        return f"{done}{in_place(self.site)}"

    def _bounds_in_words(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{constant(self.low)} to {constant(self.high)}"
        return f"at least {constant(self.low)}" if self.low is not None else f"at most {self.high:g}"

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the domain that the bounds keep the argument off."""
        return () if self.keeps_sign else edges_kept_off(self.site.op, self.argument, self.low, self.high)

    @property
    def bound(self) -> float | None:
        """The upper bound of an exponent."""
        return self.high if self.site.op in EXPONENTIALS and self.argument != "exponent" else None

    def run(self, op: RunningOp) -> Any:
        if self.argument:
            given = op.argument(self.argument)
            return op.run() if given is None else op.run(**{self.argument: self._clamped(given)})
        hides = self.nan and any(bool(taken.isnan().any()) for _, taken in op.tensors())
        return op.run() if hides else tree_map(self._clamped, op.run())

    def _clamped(self, value: Any) -> Any:
        if not is_tensor(value) or str(value.dtype) == "torch.bool":
            return value
        if self.keeps_sign and self.low is not None:
            return value.where(~(value.abs() < self.low), self.low)
        if not value.is_floating_point():
            return value.clamp(self.low, self.high)
        if self.nan:
            value = value.where(value.isfinite() if self.argument else ~value.isnan(), self.fill)
        # A bound that the format cannot hold never binds; torch refuses it.
        limit = FORMATS[str(value.dtype).removeprefix("torch.")].max
        low, high = (bound if bound is not None and abs(bound) <= limit else None for bound in (self.low, self.high))
        return value if low is None and high is None else value.clamp(low, high)

    def works_in_place(self, *, has_out: bool) -> bool:
        """Return True if an argument is clamped: its memory stays the same."""
        return self.argument != ""

    def write(self, source: SourceWriter) -> None:
        expression = source.open(self.site)
        source.places[self] = {expression.node}
        self._write_at(source, expression)

    def write_beside(self, source: SourceWriter) -> None:
        """Clamp the other arguments with which the statement calls the function, unless an edit of their own does."""
        expression = source.open(self.site) if self.edges else None
        for other in _others_like(source, expression, self.site.op) if expression is not None else ():
            if not any(other.node in nodes for nodes in source.places.values()):
                with suppress(CannotWriteError):
                    self._write_at(source, other)
                    source.places[self].add(other.node)

    def _write_at(self, source: SourceWriter, expression: Expression) -> None:
        if self.nan and not self.argument:
            _write_zero(expression)
            return
        target = expression.argument_node(self.argument) if self.argument else expression.node
        is_written = self.argument == "self" and name_called(expression.node).endswith("_")  # not to a copy of it
        if not isinstance(target, ast.expr) or is_written:
            raise CannotWriteError
        taken = source.moved(self, expression.editor.code(target))
        if source.only_moves:
            expression.editor.replace(target, taken)
        elif self.keeps_sign and self.low is not None:
            wanted = "second" if self.argument == "other" and self.site.op not in DIVISIONS else "divisor"
            first, again, before = expression.editor.named(target, taken, wanted)
            low = constant(self.low)
            is_near = f"{first} == 0" if self.low == 1 else f"{first}.abs() < {low}"  # a count below 1 is 0
            expression.editor.replace(target, f"torch.where({is_near}, {low}, {again})", before)
        else:
            bounds = {"min": self.low, "max": self.high}
            given = ", ".join(f"{name}={constant(value)}" for name, value in bounds.items() if value is not None)
            call = "nan_to_num(0.0, 0.0, 0.0)" if self.nan else f"clamp({given})"
            expression.editor.replace(target, f"{grouped(taken)}.{call}")


def _argument_in_words(op: str, argument: str) -> str:
    if argument == "other":
        return "the divisor" if op == "div" else "the second argument"
    if argument in ("self", "input"):
        return "the first argument" if op in _BINARY else "the argument"
    if argument.startswith("tensors["):
        return f"operand {int(argument[8:-1]) + 1}"
    return f"the {argument or 'result'}" if argument in ("", "exponent") else argument


def _others_like(source: SourceWriter, expression: Expression, name: str) -> Iterator[Expression]:
    """Yield the statement's other calls of the same function: another batch may be on the edge there."""
    tree, seen = expression.editor.tree, {expression.node}
    place = tree.statement_of(expression.node) or tree.scope_of(expression.node)
    ops = [op for op in source.ops if op.op == name] if not isinstance(place, (*FUNCTIONS, ast.Module)) else []
    for node, op in expression.editor.calls(ops):
        if node in seen or (tree.statement_of(node) or tree.scope_of(node)) is not place:
            continue
        seen.add(node)
        if isinstance(node, ast.Call) and name_called(node).rstrip("_") != name:
            continue  # another function calls the op, and its arguments may be anything
        if not _is_kept_off_zero(op, source.ops):
            yield Expression(expression.editor, node, op)


def _is_kept_off_zero(op: OpCall, ops: Sequence[OpCall]) -> bool:
    """Return True if the op's input is bounded from below, has a positive number added, or is an exponential."""
    maker = next(ancestors(ops, op.inputs[0], 4, through=MOVES | CASTS), None)
    if maker is None:
        return False
    scalars = dict(maker.scalars).values()
    return maker.op == "exp" or (maker.op in CLAMPS | MAXIMA | {"add"} and max(scalars, default=0.0) > 0)


_PER_ELEMENT = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"}) | {
    "binary_cross_entropy_with_logits"
}
_PER_LABEL = frozenset({"cross_entropy", "nll_loss"})


def _write_zero(expression: Expression) -> None:
    """Divide by the number of values or 1. Raises CannotWriteError where these cannot be counted."""
    made_by = expression.op.op if expression.op is not None else ""
    if _write_loss(expression, made_by):
        return
    if made_by not in SPREADS | {"mean"}:
        raise CannotWriteError
    factors, taken = _factors_of_count(expression), expression.argument_node("self")
    wanted = "values" if made_by in SPREADS else "averaged"
    first, again, before = expression.editor.named(taken, expression.editor.code(taken), wanted)
    count = " * ".join(f"{again}.{factor}" for factor in factors)
    if made_by in SPREADS:  # of a single value it is 0
        text = expression.with_keyword("correction", f"min(1, {count} - 1)", {taken: first})
    else:
        text = f"{first}.sum({', '.join(expression.texts_after_first())}) / max({count}, 1)"
    expression.editor.replace(expression.node, text, before)


def _factors_of_count(expression: Expression) -> list[str]:
    """Return what is multiplied to count the values averaged along the written dimensions; without any, of all values.

    Raises CannotWriteError if the dimensions are names, or other arguments are given.
    """
    given = expression.arguments[1:]
    written = [value for keyword, value in given if keyword in (None, "dim")]
    if len(written) > 1 or any(keyword not in (None, "dim", "keepdim", "correction") for keyword, _ in given):
        raise CannotWriteError
    try:
        dims = [ast.literal_eval(value) for value in written]
    except ValueError as error:
        raise CannotWriteError from error
    several = list(dims[0]) if dims and isinstance(dims[0], tuple | list) else dims
    if any(type(dim) is not int for dim in several):
        raise CannotWriteError
    return [f"shape[{dim}]" for dim in several] or ["numel()"]


def _write_loss(expression: Expression, made_by: str) -> bool:
    """Write an averaging loss that is 0 if it averages nothing; return False if it is called in another way."""
    call = expression.node
    if not isinstance(call, ast.Call) or has_stars(call):
        return False
    name, change = name_called(call), expression.editor
    given = {item.arg: expression.editor.code(item.value) for item in call.keywords}
    if len(call.args) != 2 or expression.argument_node("self") is not call.args[0] or given.keys() - {"ignore_index"}:
        return False
    if name in _PER_ELEMENT:  # broadcast shapes have more losses than either has elements, so count the losses
        first, again, before = change.named(call, expression.with_keyword("reduction", '"none"'), "losses")
        change.replace(call, f"{first}.sum() / max({again}.numel(), 1)", before)
        return True
    if name in _PER_LABEL and made_by.startswith("nll_loss"):  # the target has labels, not probabilities
        first, again, before = change.named(call.args[1], change.code(call.args[1]), "labels")
        total = expression.with_keyword("reduction", '"sum"', {call.args[1]: first})
        count = f"({again} != {given.get('ignore_index', '-100')}).sum().clamp(min=1)"
        change.replace(call, f"{total} / {count}", before)
        return True
    return False
