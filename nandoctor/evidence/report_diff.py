"""Two reports side by side: what the diff of a failure and its fix, of two epochs or of two formats says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nandoctor.evidence.serialization import INLINED
from nandoctor.evidence.trace import Place

COMPARISON_SCHEMA = "nandoctor.comparison/2"

ComparisonOutcome = Literal["fixed", "broken", "moved", "same-failure", "both-finite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFact:
    """One fact of the reports that differs; None where a report does not have it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """One module call in both reports, under autocast; magnitudes and headroom are None where no value is finite.

    `growth` is the later absmax over the earlier one, None where either is not known or zero.
    """

    place: Place = field(metadata=INLINED)
    finite_before: bool
    finite_after: bool
    absmax_before: float | None
    absmax_after: float | None
    headroom_before: float | None
    headroom_after: float | None
    growth: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from one report to the other.

    `fixed`: the first is non-finite and the second is not; `broken`: the reverse; `moved`: both are, from another
    origin or cause; `same-failure`, `both-finite`. `layers` has the calls that both runs made and whose finiteness
    changed or whose absmax changed by a factor of 1.4 or more, those that became non-finite or finite first, then the
    largest changes. `num_shared` counts the calls that both made; those of one run alone are listed.
    """

    schema: str = COMPARISON_SCHEMA
    before: str
    after: str
    outcome: ComparisonOutcome
    headline: str
    changes: tuple[ChangedFact, ...]
    layers: tuple[LayerChange, ...]
    num_shared: int
    only_before: tuple[Place, ...]
    only_after: tuple[Place, ...]
    tightest_before: float | None
    tightest_after: float | None
