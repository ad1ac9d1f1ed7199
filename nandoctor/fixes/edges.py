"""What a change that keeps an argument within bounds does at them: where a derivative, or the format, ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from nandoctor.evidence.edits import ClampArgument, GuardArgument, SingleEdit
from nandoctor.ops import DOMAINS, EXPONENTIALS
from nandoctor.text import constant, number

_PROBED = "_probed"


def edges_of(edit: SingleEdit) -> tuple[float, ...]:
    """The edges of the op's domain that the edit keeps its argument from; () for any other edit."""
    if not isinstance(edit, ClampArgument | GuardArgument):
        return ()
    domain = DOMAINS.get(edit.site.op)
    keeps_sign = isinstance(edit, ClampArgument) and edit.keeps_sign
    if domain is None or domain.argument != edit.argument or keeps_sign:
        return ()
    ends = ((domain.low, edit.low), (domain.high, edit.high))
    return tuple(edge for edge, kept in ends if kept is not None and math.isfinite(edge))


def text_at_edges(text: str, edit: ClampArgument | GuardArgument) -> str:
    """The source text of an argument with what is on an edge or beyond it exactly there, and its gradient kept."""
    made, edges = _PROBED, edges_of(edit)
    for place, edge in enumerate(edges, 1):
        value = f"({_PROBED} := {text})" if place == len(edges) else _PROBED  # evaluated from the outside in
        sign = "<=" if edge == DOMAINS[edit.site.op].low else ">="
        made = f"torch.where({value} {sign} {edge}, {_PROBED} - {_PROBED}.detach() + {edge}, {made})"
    return made


def bound_of(edit: SingleEdit) -> float | None:
    """The largest exponent that the edit leaves, None for any other edit; the powers of larger ones are lost."""
    is_exponent = isinstance(edit, ClampArgument) and edit.site.op in EXPONENTIALS
    return edit.high if isinstance(edit, ClampArgument) and is_exponent else None


def text_past_bound(text: str, bound: float) -> str:
    """The source text of an exponent with all of it between the bound and the largest one, in the same order."""
    above = f"{_PROBED}.amax() - {bound}"
    share = f"({_PROBED} - {_PROBED}.amin()) / ({_PROBED}.amax() - {_PROBED}.amin()).clamp(min=1e-9)"
    made = f"{bound} + ({above}) * (0.1 + 0.9 * {share})"
    return f"torch.where(({_PROBED} := {text}).amax() > {bound}, {made}, {_PROBED})"


def describe_cost(edits: Iterable[SingleEdit]) -> str:
    """What a clamp makes of values at the edge: "acos(1) is 0.0014 (exactly: 0)"; "" where that cannot be told."""
    return "; ".join(dict.fromkeys(told for edit in edits for told in _costs(edit)))


def _costs(edit: SingleEdit) -> Iterator[str]:
    if not isinstance(edit, ClampArgument) or (function := getattr(torch, edit.site.op, None)) is None:
        return
    for edge in edges_of(edit):
        kept = edit.low if edge == DOMAINS[edit.site.op].low else edit.high
        try:
            at_edge, clamped = (float(function(torch.tensor(value, dtype=torch.float64))) for value in (edge, kept))
        except TypeError:  # a power takes an exponent as well
            continue
        yield f"{edit.site.op}({constant(edge)}) is {number(clamped)} (exactly: {number(at_edge)})"
