"""The text of a guard: the conditions under which an argument is kept, and 0 in place of what is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst

from nandoctor.evidence.edits import GuardArgument
from nandoctor.fixes.source_expression import operand_text, operator_text, target_of, text_with
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
