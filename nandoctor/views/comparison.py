"""The document of `nandoctor diff`: two reports side by side."""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.evidence.report_diff import ChangedFact, Comparison, LayerChange
from nandoctor.text import brief, number, part_of, plural
from nandoctor.views.blocks import Block, Column, Fact, Facts, Headline, Section, Table, Tone

_MIN_NAME_WIDTH = 16
_TONES: dict[str, Tone] = {
    "fixed": "good",
    "both-finite": "good",
    "same-failure": "unclear",
    "broken": "failed",
    "moved": "failed",
}
_GRADES = {
    "exact": "reproduces the saved output",
    "same-mask": "the same values are non-finite",
    "elsewhere": "other values are non-finite",
    "finite": "finite",
    "no-reference": "nothing to compare with",
}
"""The meaning of a replay's grade against the saved output."""
_TURNS: dict[tuple[bool, bool], Tone] = {(False, True): "good", (True, False): "failed"}


def comparison_document(comparison: Comparison) -> Iterator[Block]:
    """Yield the outcome, the facts that changed, and the layers that changed most."""
    word = f"{comparison.outcome.replace('-', ' ').upper()}:"
    yield Headline(comparison.headline, word=word, tone=_TONES[comparison.outcome])
    yield Section("", [Facts([Fact("before", comparison.before), Fact("after", comparison.after)])])
    if comparison.changes:
        yield Section("", [Facts([Fact(change.name, _describe_change(change)) for change in comparison.changes])])
    yield Section("", [_table(comparison)])


def _describe_change(change: ChangedFact) -> str:
    """Return the fact before and after; a replay's grade in words."""
    words = _GRADES if change.name == "replay" else {}
    return " -> ".join(words.get(value, brief(value)) if value else "none" for value in (change.before, change.after))


def _describe_layers(comparison: Comparison) -> str:
    """Return how many of the calls that both reports have changed."""
    if not comparison.layers:
        compared = plural(comparison.num_shared, "call")
        return f"No call changed by a factor of 1.4 or more ({compared} that both made)."
    changed = part_of(len(comparison.layers), comparison.num_shared, "call")
    return f"{changed} changed (largest magnitudes in the replay)"


def _table(comparison: Comparison) -> Table:
    changes = comparison.layers
    columns = (
        Column("layer", [change.place.label for change in changes], least=_MIN_NAME_WIDTH),
        Column("before", [_size(change.absmax_before, finite=change.finite_before) for change in changes], right=True),
        Column("after", [_size(change.absmax_after, finite=change.finite_after) for change in changes], right=True),
        Column("times", [_times(change) for change in changes], right=True, spare=1),
    )
    tones = [_TURNS.get((change.finite_before, change.finite_after), "") for change in changes]
    return Table(title=_describe_layers(comparison), columns=columns if changes else (), tones=tones)


def _times(change: LayerChange) -> str:
    """Return the growth of a magnitude; "-" if either call was non-finite, whose largest finite value says nothing."""
    known = change.growth is not None and change.finite_before and change.finite_after
    return number(change.growth or 0.0) if known else "-"


def _size(absmax: float | None, *, finite: bool) -> str:
    if not finite:
        return "NaN/Inf"
    return "-" if absmax is None else number(absmax)
