"""Phrases that the headlines of several causes share: the user's own expressions, and values past a format's limit."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from nandoctor.causes.base import Finding
from nandoctor.changes.expression import OPERATORS, REFLECTED, operands
from nandoctor.changes.source_tree import name_called
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import OpCall, TensorStats
from nandoctor.ops import CASTS, DIVISIONS, LOGARITHMS, NORMALISATIONS
from nandoctor.text import are, code, excess, nonfinite_part, number, part_of

_CAST_METHODS = frozenset({"to", "half", "bfloat16", "type", "type_as"})
_BINARY = frozenset(OPERATORS.values()) | {"xlogy"}
_OPERAND_KEYWORDS = frozenset({None, "input", "self", "other", "exponent"})


def subject(op: OpCall) -> str:
    """Return the expression that called the op, or the op's name and module if the source is not known."""
    if op.own_line is not None and op.own_line.expression:
        return code(op.own_line.expression)
    return f"{op.op} in {op.place.in_words}"


def operand(op: OpCall, name: str) -> str | None:
    """Return the source text of the argument with this schema name, or None if the expression does not show it."""
    expression = op.own_line.expression if op.own_line is not None else ""
    return find_operand(expression, op.op, name, alone=_is_alone(op))


def find_operand(expression: str, op: str, name: str, *, alone: bool) -> str | None:
    """Return the source text of an operand, or None; `alone`: the op takes one tensor and no number."""
    try:
        statement = ast.parse(expression).body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError, IndexError):
        return None
    node = _arguments(statement, op, alone=alone).get(name)
    text = ast.get_source_segment(expression, node) if node is not None else None
    return None if text is None else code(text)


def argument(op: OpCall, name: str) -> str:
    """Return the source text of an argument, or a phrase for it if the expression does not show it."""
    return operand(op, name) or place_of_operand(op.op, name, alone=_is_alone(op))


def _is_alone(op: OpCall) -> bool:
    """Return True if the op takes one tensor and no number."""
    return len(op.inputs) == 1 and not op.scalars


def place_of_operand(op: str, name: str, *, alone: bool) -> str:
    """Return a phrase for an operand: "self" and "other" are the schema's names, not the user's."""
    if name == "self":
        return "its argument" if alone else "the first operand"
    if name == "other":
        return "the divisor" if op in DIVISIONS else "the second operand"
    return name


def _arguments(statement: ast.stmt, op: str, *, alone: bool) -> dict[str, ast.expr]:
    """Return the arguments of an operator, cast or function call by schema name; empty if they are not clear."""
    node = statement.value if isinstance(statement, ast.Expr) else statement
    name = name_called(node).rstrip("_")  # without the underscore of an in-place one
    if isinstance(node, ast.AugAssign) and op == OPERATORS.get(type(node.op)):
        return {"self": node.target, "other": node.value, "exponent": node.value}
    if isinstance(node, ast.BinOp):
        if op not in (OPERATORS.get(type(node.op)), REFLECTED.get(type(node.op))):
            return {}
        first, second = operands(node, op)
        return {"self": first, "other": second, "exponent": second}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and op in CASTS:
        return {"self": node.func.value} if name in _CAST_METHODS else {}
    if isinstance(node, ast.Call) and name == op:
        return _call_operands(node, 1 if alone else 2 if op in _BINARY else 0)
    return {}


def _call_operands(node: ast.Call, num_operands: int) -> dict[str, ast.expr]:
    """Return the operands of `torch.div(x, y)` or `x.div(y)`, where the receiver is the first; empty if unclear."""
    if any(keyword.arg in _OPERAND_KEYWORDS for keyword in node.keywords):
        return {}
    receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    taken = node.args if len(node.args) == num_operands else [*receiver, *node.args]
    if len(taken) != num_operands or any(isinstance(operand, ast.Starred) for operand in taken):
        return {}
    return dict(zip(("self", "other", "exponent"), [*taken, *taken[1:]], strict=False))


def past(value: float | None, low: FloatFormat) -> str:
    """Return how a value exceeds its format: "reaches 214,599; fp16 stops at 65,504"."""
    if value is None:
        return "is too large even for float64"
    if low.holds(value):
        return f"overflows {low} on its way to {number(value)}"
    limit = low.max if value > 0 else -low.max
    return f"reaches {number(value, unlike=limit)}; {low} stops at {number(limit)}"


def explain_overflow(finding: Finding, made_by: str, evidence: Sequence[Evidence] = (), *, then: str = "") -> Account:
    """Return the account of an op whose result exceeds its format.

    `made_by` is the subject of the explanation; `then` ends both explanation and headline.
    """
    low, num_bad, exact = finding.format, finding.analysis.num_bad, finding.analysis.exact
    reached, size = past(exact, low), None if exact is None else abs(exact)
    text = f"the largest exact value {past(size, low)}"
    if size is not None and not low.holds(size):
        beyond = f"{excess(size, low.max)} what {low} can hold ({number(low.max)})"
        text = f"the largest exact value is {number(size, unlike=low.max)}, {beyond}"
    share = f"{part_of(num_bad, finding.analysis.numel, 'element')} {are(num_bad)} non-finite"
    return Account(
        headline=f"{subject(finding.op)} {reached}{then}",
        explanation=f"{made_by} {reached}{then}.",
        evidence=(Evidence("would_be", size, text), Evidence("num_bad", num_bad, share), *evidence),
    )


def at_singularity(op: OpCall, kinds: Sequence[str]) -> str:
    """Return what a singular op does at its singularity: "divides 0 by 0", "takes the logarithm of 0"."""
    if op.op in LOGARITHMS:
        return "takes the logarithm of 0"
    if op.op in DIVISIONS | NORMALISATIONS | {"_weight_norm", "pow"}:
        return "divides 0 by 0" if tuple(kinds) == ("nan",) else "divides by 0"
    return f"evaluates {op.op} where it is infinite"


def how_nonfinite(stats: TensorStats) -> str:
    """Return how many values of a tensor are non-finite: "is NaN in 80 of 128 values"."""
    if stats.counts is None:
        return "is non-finite"
    return f"is {nonfinite_part(stats.counts.kinds, stats.counts.num_bad, stats.numel, 'value')}"
