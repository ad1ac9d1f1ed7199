"""Says what a clamp changes at the edge of a domain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from nandoctor.changes.clamp import ClampArgument
from nandoctor.evidence.edits import SingleEdit
from nandoctor.ops import DOMAINS
from nandoctor.text import constant, number


def describe_cost(edits: Iterable[SingleEdit]) -> str:
    """Return a clamp's error at the edge, such as "acos(1) is 0.0014 (exactly: 0)"; "" if it cannot be computed."""
    return "; ".join(dict.fromkeys(told for edit in edits for told in _costs(edit)))


def _costs(edit: SingleEdit) -> Iterator[str]:
    if not isinstance(edit, ClampArgument) or (function := getattr(torch, edit.site.op, None)) is None:
        return
    for edge in edit.edges:
        kept = edit.low if edge == DOMAINS[edit.site.op].low else edit.high
        try:
            at_edge, clamped = (float(function(torch.tensor(value, dtype=torch.float64))) for value in (edge, kept))
        except TypeError:  # such as pow, which needs an exponent as well
            continue
        yield f"{edit.site.op}({constant(edge)}) is {number(clamped)} (exactly: {number(at_edge)})"
