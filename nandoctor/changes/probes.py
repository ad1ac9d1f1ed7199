"""Values that another batch may have at a change: on the edge of an op's domain, or past the bound of an exponent.

A probe is the text of an argument that moves its values there; the step is run with it in place of the argument's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nandoctor.ops import DOMAINS

Where = Literal["edge", "bound"]
"""On the edge of a function's domain, or past the bound of an exponent."""
_PROBED = "_probed"
_LEAST_ABOVE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Where a text moves the arguments that it changes; with `alone`, it moves them and leaves out the change."""

    to: Where
    alone: bool = False


def edges_kept_off(op: str, argument: str, low: float | None, high: float | None) -> tuple[float, ...]:
    """Return the finite edges of an op's domain that a `low` or `high` for its argument keeps off."""
    domain = DOMAINS.get(op)
    if domain is None or domain.argument != argument:
        return ()
    ends = ((domain.low, low), (domain.high, high))
    return tuple(edge for edge, kept in ends if kept is not None and math.isfinite(edge))


def text_at_edges(text: str, op: str, edges: Sequence[float]) -> str:
    """Return an argument's text with values on or beyond an edge moved exactly onto it, with their gradients kept.

    The value nearest to the edge is moved in any case, so that the edge is reached wherever the text runs.
    """
    made = _PROBED
    for place, edge in enumerate(edges, 1):
        value = f"({_PROBED} := {text})" if place == len(edges) else _PROBED  # the outermost condition runs first
        is_low = edge == DOMAINS[op].low
        sign, far, nearest, end = ("<=", "torch.inf", "amin", "min") if is_low else (">=", "-torch.inf", "amax", "max")
        limit = f"{_PROBED}.detach().nan_to_num({far}).{nearest}().clamp({end}={edge})"
        made = f"torch.where({value} {sign} {limit}, {_PROBED} - {_PROBED}.detach() + {edge}, {made})"
    return made


def text_past_bound(text: str, bound: float) -> str:
    """Return an exponent's text with all values moved past the bound, up to the largest one, in the same order.

    So are those of calls that stay below the bound in this batch: the next batch's may not.
    """
    above = f"({_PROBED}.amax() - {bound}).clamp(min={_LEAST_ABOVE})"
    least = f"{_PROBED}.nan_to_num(torch.nan, neginf=torch.inf).amin()"  # a mask's -inf stays as it is
    share = f"(({_PROBED} := {text}) - {least}) / ({_PROBED}.amax() - {least}).clamp(min=1e-9)"
    return f"{bound} + (0.1 + 0.9 * {share}) * {above}"
