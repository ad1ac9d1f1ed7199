"""Writes 0 for the NaN of an empty average, but not for a NaN in the averaged values."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from nandoctor.changes.expression import Expression, has_stars
from nandoctor.changes.source_tree import CannotWriteError, name_called
from nandoctor.changes.text_lines import grouped
from nandoctor.ops import SPREADS

_PER_ELEMENT = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"}) | {
    "binary_cross_entropy_with_logits"
}
_PER_LABEL = frozenset({"cross_entropy", "nll_loss"})
_NOT_A_CLASS = "-100"


def write_zero(expression: Expression) -> None:
    """Divide by the number of values or 1. Raises CannotWriteError where these cannot be counted."""
    if _write_loss(expression):
        return
    made_by, factors = expression.op.op if expression.op is not None else "", _factors_of_count(expression)
    if factors is None or made_by not in SPREADS | {"mean"}:
        raise CannotWriteError
    taken, wanted = expression.argument_node("self"), "values" if made_by in SPREADS else "averaged"
    first, again, before = expression.editor.named(taken, expression.editor.code(taken), wanted)
    if made_by in SPREADS:  # of a single value it is 0
        correction = f"min(1, {_product(grouped(again), factors)} - 1)"
        text = expression.with_keyword("correction", correction, {taken: first})
    else:
        total = f"{grouped(first)}.sum({', '.join(expression.texts_after_first())})"
        text = f"{total} / max({_product(again, factors)}, 1)"
    expression.editor.replace(expression.node, text, before)


def _factors_of_count(expression: Expression) -> list[str] | None:
    """Return what is multiplied to count the values averaged along the written dimensions, None if others are given.

    Without a dimension that is the number of all values.
    """
    keywords = {keyword for keyword, _ in expression.arguments[1:]}
    written = [value for keyword, value in expression.arguments[1:] if keyword in (None, "dim")]
    try:
        dims = [ast.literal_eval(value) for value in written]
    except ValueError:  # names
        return None
    several = list(dims[0]) if dims and isinstance(dims[0], tuple | list) else dims
    if (
        len(dims) > 1
        or keywords - {None, "dim", "keepdim", "correction"}
        or any(type(dim) is not int for dim in several)
    ):
        return None
    return [f"shape[{dim}]" for dim in several] or ["numel()"]


def _product(name: str, factors: Sequence[str]) -> str:
    return " * ".join(f"{name}.{factor}" for factor in factors)


def _write_loss(expression: Expression) -> bool:
    """Write an averaging loss that is 0 if it averages nothing; return False if it is called in another way."""
    call, made_by = expression.node, expression.op.op if expression.op is not None else ""
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
        count = f"({again} != {given.get('ignore_index', _NOT_A_CLASS)}).sum().clamp(min=1)"
        change.replace(call, f"{total} / {count}", before)
        return True
    return False
