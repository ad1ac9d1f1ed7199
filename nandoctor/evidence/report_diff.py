"""Records of two reports compared: a failure and its fix, two epochs, or two formats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nandoctor.evidence.codec import INLINED
from nandoctor.evidence.trace import Place

COMPARISON_SCHEMA = "nandoctor.comparison/3"

ComparisonOutcome = Literal["fixed", "broken", "moved", "same-failure", "both-finite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFact:
    """One fact that differs between the reports; None in a report that lacks it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """One module call in both reports, under autocast; magnitudes are None if no value is finite.

    `growth` is the later absmax over the earlier one, None if either is unknown or zero.
    """

    place: Place = field(metadata=INLINED)
    finite_before: bool
    finite_after: bool
    absmax_before: float | None
    absmax_after: float | None
    growth: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The changes from one report to the other.

    `fixed`: the first is non-finite and the second is not; `broken`: the reverse; `moved`: both are non-finite, with
    another origin or cause; `same-failure`, `both-finite`. `layers` has the calls of both runs that became finite or
    non-finite, or whose absmax changed by a factor of 1.4 or more: first the former, then the largest changes.
    `num_shared` counts the calls of both runs.
    """

    schema: str = COMPARISON_SCHEMA
    before: str
    after: str
    outcome: ComparisonOutcome
    headline: str
    changes: tuple[ChangedFact, ...]
    layers: tuple[LayerChange, ...]
    num_shared: int
