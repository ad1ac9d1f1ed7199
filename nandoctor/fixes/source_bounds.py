"""Writes clamps and guards that keep an argument within bounds, and probes of what they do at those bounds."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from nandoctor.changes.editor import Editor, Texts
from nandoctor.changes.expression import Expression, operator_of
from nandoctor.changes.source_tree import CannotWriteError, SourceTree, name_called
from nandoctor.changes.text_lines import grouped
from nandoctor.evidence.edits import ClampArgument, GuardArgument, SingleEdit
from nandoctor.ops import DIVISIONS, DOMAINS, EXPONENTIALS
from nandoctor.text import constant, number

_PROBED = "_probed"


def edges_of(edit: SingleEdit) -> tuple[float, ...]:
    """Return the edges of the op's domain that the edit keeps its argument off; () for any other edit."""
    if not isinstance(edit, ClampArgument | GuardArgument):
        return ()
    domain = DOMAINS.get(edit.site.op)
    keeps_sign = isinstance(edit, ClampArgument) and edit.keeps_sign
    if domain is None or domain.argument != edit.argument or keeps_sign:
        return ()
    ends = ((domain.low, edit.low), (domain.high, edit.high))
    return tuple(edge for edge, kept in ends if kept is not None and math.isfinite(edge))


def text_at_edges(text: str, edit: ClampArgument | GuardArgument) -> str:
    """Return an argument's text with values on or beyond an edge moved exactly onto it, with their gradients kept.

    The value nearest to the edge is moved in any case, so that the edge is reached wherever the text runs.
    """
    made, edges = _PROBED, edges_of(edit)
    for place, edge in enumerate(edges, 1):
        value = f"({_PROBED} := {text})" if place == len(edges) else _PROBED  # the outermost condition runs first
        is_low = edge == DOMAINS[edit.site.op].low
        sign, far, nearest, end = ("<=", "torch.inf", "amin", "min") if is_low else (">=", "-torch.inf", "amax", "max")
        limit = f"{_PROBED}.detach().nan_to_num({far}).{nearest}().clamp({end}={edge})"
        made = f"torch.where({value} {sign} {limit}, {_PROBED} - {_PROBED}.detach() + {edge}, {made})"
    return made


def bound_of(edit: SingleEdit) -> float | None:
    """Return the largest exponent that the edit allows, None for any other edit; it clamps larger ones."""
    if not isinstance(edit, ClampArgument) or edit.argument == "exponent":
        return None
    return edit.high if edit.site.op in EXPONENTIALS else None


def text_past_bound(text: str, bound: float) -> str:
    """Return an exponent's text with all values moved between the bound and the largest one, in the same order."""
    above = f"{_PROBED}.amax() - {bound}"
    share = f"({_PROBED} - {_PROBED}.amin()) / ({_PROBED}.amax() - {_PROBED}.amin()).clamp(min=1e-9)"
    made = f"{bound} + ({above}) * (0.1 + 0.9 * {share})"
    return f"torch.where(({_PROBED} := {text}).amax() > {bound}, {made}, {_PROBED})"


def describe_cost(edits: Iterable[SingleEdit]) -> str:
    """Return a clamp's error at the edge, such as "acos(1) is 0.0014 (exactly: 0)"; "" if it cannot be computed."""
    return "; ".join(dict.fromkeys(told for edit in edits for told in _costs(edit)))


def _costs(edit: SingleEdit) -> Iterator[str]:
    if not isinstance(edit, ClampArgument) or (function := getattr(torch, edit.site.op, None)) is None:
        return
    for edge in edges_of(edit):
        kept = edit.low if edge == DOMAINS[edit.site.op].low else edit.high
        try:
            at_edge, clamped = (float(function(torch.tensor(value, dtype=torch.float64))) for value in (edge, kept))
        except TypeError:  # such as pow, which needs an exponent as well
            continue
        yield f"{edit.site.op}({constant(edge)}) is {number(clamped)} (exactly: {number(at_edge)})"


Probe = Literal["edge", "past bound", "past bound alone"]
"""Arguments on the edge of a domain; exponents past a clamp's bound, and the same without the clamp."""


def write_clamp(change: Editor, expression: Expression, edit: ClampArgument, probe: Probe | None) -> None:
    """Write a clamp of an argument, or of the op's result."""
    if edit.nan and not edit.argument:
        _take_zero(change, expression)
        return
    target = expression.argument_node(edit.argument) if edit.argument else expression.node
    if not isinstance(target, ast.expr):
        raise CannotWriteError
    writes = "_" if _is_written(expression.node, edit) else ""
    taken = _argument(expression, target, edit, probe)
    if writes and taken != expression.code(target):
        taken = f"{_read_twice(change, target)}.copy_({taken})"
    before: tuple[str, ...] = ()
    if edit.keeps_sign and edit.low is not None:
        wanted = "second" if edit.argument == "other" and edit.site.op not in DIVISIONS else "divisor"
        first, again, before = change.named(target, taken, wanted)
        low = constant(edit.low)
        is_near = f"{first} == 0" if edit.low == 1 else f"{first}.abs() < {low}"  # a count below 1 is 0
        text = f"torch.where({is_near}, {low}, {again})"
        if writes:
            is_near = f"{again} == 0" if edit.low == 1 else f"{again}.abs() < {low}"
            text = f"{first}.masked_fill_({is_near}, {low})"
    elif edit.nan:
        text = f"{grouped(taken)}.nan_to_num{writes}(0.0)"
    elif probe == "past bound alone":
        text = taken
    else:
        bounds = {"min": edit.low, "max": edit.high}
        given = ", ".join(f"{name}={constant(value)}" for name, value in bounds.items() if value is not None)
        text = f"{grouped(taken)}.clamp{writes}({given})"
    expression.replace_arguments({target: text}, before)


def _is_written(node: ast.AST, edit: ClampArgument | GuardArgument) -> bool:
    """Return True if the op writes to the argument, like `x.log_()`: a copy in its place would not be written to."""
    return edit.argument in ("self", "input") and name_called(node).endswith("_")


def _read_twice(change: Editor, node: ast.expr) -> str:
    """Return the text of a name or attribute, which can be read twice. Raises CannotWriteError for anything else."""
    if not isinstance(node, ast.Name | ast.Attribute):
        raise CannotWriteError
    return change.tree.code(node)


def _take_zero(change: Editor, expression: Expression) -> None:
    """Write 0 for the NaN of an empty average, but not for a NaN in the averaged values."""
    node = expression.node
    if _write_average_loss(change, expression):
        return
    made_by = expression.op.op if expression.op is not None else ""
    count = _count_averaged(expression)
    if made_by == "mean" and count is not None:
        averaged = expression.argument_node("self")
        first, again, before = change.named(averaged, expression.code(averaged), "averaged")
        total = f"{grouped(first)}.sum({', '.join(expression.texts_after_first())})"
        change.replace(node, f"{total} / max({again}.{count}, 1)", before)
        return
    if made_by in ("std", "var") and count is not None:  # it is 0 for a single value
        subject = expression.argument_node("self")
        first, again, before = change.computed_once(subject, "values")
        text = expression.with_keyword("correction", f"min(1, {grouped(again)}.{count} - 1)", {subject: first})
        change.replace(node, text, before)
        return
    tensors = list(expression.tensors())
    tensors = tensors or [expression.argument_node("self")]  # an empty tensor has no numbers in the trace
    named = {tensor: change.named(tensor, expression.code(tensor), "averaged") for tensor in tensors}
    whole = expression.with_texts({tensor: again for tensor, (_, again, _) in named.items()})
    first, again, before = change.named(node, whole, "average")
    spoiled = " | ".join(f"{text}.isnan().any()" for text, _, _ in named.values())
    text = f"torch.where({spoiled}, {first}, {again}.nan_to_num(0.0, torch.inf, -torch.inf))"
    statements = tuple(line for _, _, lines in named.values() for line in lines)
    change.replace(node, text, (*statements, *before))


def _count_averaged(expression: Expression) -> str | None:
    """Return what counts the values averaged along one or all dimensions; None if the op is called otherwise."""
    given = expression.texts_after_first()
    dims = [text.removeprefix("dim=") for text in given if not text.startswith("keepdim=")]
    if len(dims) > 1 or not all(text.removeprefix("-").isdecimal() for text in dims):
        return None
    return f"shape[{dims[0]}]" if dims else "numel()"


def _argument(expression: Expression, node: ast.expr, edit: ClampArgument | GuardArgument, probe: Probe | None) -> str:
    """Return the text of an argument, moved to the edge of its domain or past its bound if the probe says so."""
    text, bound = expression.code(node), bound_of(edit)
    if probe == "edge":
        return text_at_edges(text, edit) if edges_of(edit) else text
    return text_past_bound(text, bound) if probe is not None and bound is not None else text


def write_guard(change: Editor, expression: Expression, edit: GuardArgument, probe: Probe | None) -> None:
    """Write an op that is a constant, without a gradient, where its argument is outside the bounds."""
    argument = expression.argument_node(edit.argument)
    if _is_written(expression.node, edit):  # torch.where would make another tensor than the one that the op writes to
        if probe is not None:
            raise CannotWriteError
        kept = _read_twice(change, argument)
        first, again, before = change.named(expression.node, _condition(edit, kept, inside=False), "outside")
        text = expression.with_texts({argument: f"{kept}.masked_fill_({first}, {edit.safe})"})
        change.replace(expression.node, f"{text}.masked_fill_({again}, {edit.fill})", before)
        return
    is_selected = _selects_by(change.tree, expression.node, _condition(edit, expression.operand(argument), inside=True))
    first, again, before = change.named(expression.node, _argument(expression, argument, edit, probe), "guarded")
    if is_selected:
        safe = f"torch.where({_condition(edit, first, again, inside=True)}, {again}, {edit.safe})"
        text = expression.with_texts({argument: safe})
    else:
        safe = f"torch.where({_condition(edit, again, inside=False)}, {edit.safe}, {again})"
        text = _filled_where(_condition(edit, first, again, inside=False), edit.fill, expression, {argument: safe})
    change.replace(expression.node, text, before)


def _filled_where(condition: str, fill: float, expression: Expression, texts: Texts) -> str:
    """Return an expression with another text for an argument, and `fill` where the condition holds."""
    node = expression.node
    if isinstance(node, ast.AugAssign):
        target, operator = node.target, operator_of(node)
        made = f"{expression.operand(target)} {operator} {next(iter(texts.values()))}"
        return f"{expression.code(target)} = torch.where({condition}, {fill}, {made})"
    changed = expression.with_texts(texts)
    is_written = name_called(node).endswith("_")
    return (
        f"{changed}.masked_fill_({condition}, {fill})" if is_written else f"torch.where({condition}, {fill}, {changed})"
    )


def _condition(edit: GuardArgument, first: str, again: str = "", *, inside: bool) -> str:
    """Return the condition that an argument is `inside` the bounds, strictly between the ends or not 0; or outside.

    To be outside is false for NaN, which has to stay. `again` is the text for a second use, "" if it is the same.
    """
    above, below, at_zero, joint = (">", "<", "!=", " & ") if inside else ("<=", ">=", "==", " | ")
    ends = [(sign, end) for sign, end in ((above, edit.low), (below, edit.high)) if end is not None]
    pairs = zip((first, again or first), ends or [(at_zero, 0.0)], strict=False)
    parts = [f"{text} {sign} {constant(end)}" for text, (sign, end) in pairs]
    return joint.join(f"({part})" for part in parts) if len(parts) > 1 else parts[0]


def _selects_by(tree: SourceTree, node: ast.AST, condition: str) -> bool:
    """Return True if an expression is the value that a `where` selects under exactly this condition."""
    call = next((parent for parent in tree.ancestors(node) if isinstance(parent, ast.Call)), None)
    arguments = [*call.args, *(item.value for item in call.keywords)] if call is not None else []
    is_where = call is not None and tree.code(call.func).endswith("where") and len(arguments) == 3
    return is_where and node is arguments[1] and tree.code(arguments[0]) == condition


_PER_ELEMENT = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"}) | {
    "binary_cross_entropy_with_logits"
}
_PER_LABEL = frozenset({"cross_entropy", "nll_loss"})
_NOT_A_CLASS = "-100"


def _write_average_loss(change: Editor, expression: Expression) -> bool:
    """Write an averaging loss that is 0 if it averages nothing; return False if it is called in another way."""
    call, made_by = expression.node, expression.op.op if expression.op is not None else ""
    if not isinstance(call, ast.Call) or any(isinstance(arg, ast.Starred) for arg in call.args):
        return False
    name = name_called(call)
    given = {item.arg: expression.code(item.value) for item in call.keywords}
    if len(call.args) != 2 or expression.argument_node("self") is not call.args[0] or given.keys() - {"ignore_index"}:
        return False
    if name in _PER_ELEMENT:  # broadcast shapes have more losses than either has elements, so count the losses
        first, again, before = change.named(call, expression.with_keyword("reduction", '"none"'), "losses")
        change.replace(call, f"{first}.sum() / max({again}.numel(), 1)", before)
        return True
    if name in _PER_LABEL and made_by.startswith("nll_loss"):  # the target has labels, not probabilities
        first, again, before = change.computed_once(call.args[1], "labels")
        total = expression.with_keyword("reduction", '"sum"', {call.args[1]: first})
        count = f"({again} != {given.get('ignore_index', _NOT_A_CLASS)}).sum().clamp(min=1)"
        change.replace(call, f"{total} / {count}", before)
        return True
    return False
