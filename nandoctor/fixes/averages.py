"""Writes an average of what may be nothing as a sum over a count that is at least 1."""

from __future__ import annotations

import libcst as cst

from nandoctor.fixes.source_expression import Expression, grouped

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
