"""The text that stands in for an expression: an argument kept within bounds, an average of what may be nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst

from nandoctor.evidence.edits import GuardArgument
from nandoctor.fixes.source_expression import Expression, grouped, operand_text, operator_text, target_of, text_with
from nandoctor.fixes.source_tree import SourceTree
from nandoctor.fixes.titles import code_number


def zero_where(
    condition: str, tree: SourceTree, node: cst.BaseExpression | cst.AugAssign, texts: Mapping[cst.CSTNode, str]
) -> str:
    """An expression with other text for some of its arguments, and 0 where the condition holds: in place as it was."""
    if isinstance(node, cst.AugAssign):
        ((_, text),) = texts.items()
        target = target_of(node)
        operator = operator_text(tree, node)
        return f"{tree.code(target)} = torch.where({condition}, 0.0, {operand_text(tree, target)} {operator} {text})"
    changed = text_with(tree, node, texts)
    writes = isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value.endswith("_")
    return f"{changed}.masked_fill_({condition}, 0.0)" if writes else f"torch.where({condition}, 0.0, {changed})"


def inside(edit: GuardArgument, first: str, again: str | None = None) -> str:
    """The condition under which an argument is kept: strictly between the ends, or not zero."""
    return _condition([(">", edit.low), ("<", edit.high)], "&", "!= 0", (first, again or first))


def outside(edit: GuardArgument, first: str, again: str | None = None) -> str:
    """The condition under which it is not; neither holds for NaN, which is to stay."""
    return _condition([("<=", edit.low), (">=", edit.high)], "|", "== 0", (first, again or first))


def _condition(ends: Sequence[tuple[str, float | None]], joint: str, at_zero: str, texts: tuple[str, str]) -> str:
    first, again = texts
    given = [(sign, code_number(end)) for sign, end in ends if end is not None]
    parts = [f"{again if place else first} {sign} {end}" for place, (sign, end) in enumerate(given)]
    return f" {joint} ".join(f"({part})" for part in parts) if len(parts) > 1 else (parts or [f"{first} {at_zero}"])[0]


def selects_by(tree: SourceTree, node: cst.CSTNode, condition: str) -> bool:
    """Tell whether an expression is the value of a `where` that takes it under this very condition."""
    call = next((parent for parent in tree.ancestors(node) if isinstance(parent, cst.Call)), None)
    arguments = [arg.value for arg in call.args] if call is not None else []
    is_where = call is not None and tree.code(call.func).endswith("where") and len(arguments) == 3
    return is_where and node is arguments[1] and tree.code(arguments[0]) == condition


_PER_ELEMENT = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"}) | {
    "binary_cross_entropy_with_logits"
}
_PER_LABEL = frozenset({"cross_entropy", "nll_loss"})
_NOT_A_CLASS = "-100"


def write_average_loss(expression: Expression) -> str | None:
    """The text of a loss that averages, and is 0 of nothing; None where it is called in another way."""
    call, made_by = expression.node, expression.op.op if expression.op is not None else ""
    if not isinstance(call, cst.Call) or any(arg.star for arg in call.args):
        return None
    name = call.func.attr.value if isinstance(call.func, cst.Attribute) else expression.tree.code(call.func)
    given = {arg.keyword.value: expression.tree.code(arg.value) for arg in call.args if arg.keyword}
    positional = [expression.tree.code(arg.value) for arg in call.args if arg.keyword is None]
    if len(positional) != 2 or expression.argument("self") != positional[0] or given.keys() - {"ignore_index"}:
        return None
    total = expression.with_keyword("reduction", '"sum"').text
    if name in _PER_ELEMENT:
        return f"{total} / max({grouped(positional[0])}.numel(), 1)"
    if name in _PER_LABEL and made_by.startswith("nll_loss"):  # of labels, not of probabilities
        return f"{total} / ({positional[1]} != {given.get('ignore_index', _NOT_A_CLASS)}).sum().clamp(min=1)"
    return None
