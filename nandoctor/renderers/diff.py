"""Render `nandoctor diff`: two reports side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from nandoctor.evidence.report_diff import ChangedFact, Comparison, LayerChange
from nandoctor.renderers.console import Column, FittedTable, labelled, literal, print_parts, spaced
from nandoctor.renderers.facts import GRADES
from nandoctor.renderers.verdicts import FAILED, GOOD, UNCLEAR
from nandoctor.text import bits_text, brief, join_first, number, part_of, plural

_MAX_LAYERS = 12
_MAX_NAMED = 3
_MIN_NAME_WIDTH = 16
_MAX_NAME_WIDTH = 44
_TONES = {"fixed": GOOD, "both-finite": GOOD, "same-failure": UNCLEAR, "broken": FAILED, "moved": FAILED}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the outcome, the facts that changed, and the layers that changed most."""
    badge = Text(f" {comparison.outcome.upper()} ", style=_TONES[comparison.outcome].badge)
    changes, layers = comparison.changes, comparison.layers[:_MAX_LAYERS]
    others = {
        label: join_first([brief(place.label, _MAX_NAME_WIDTH) for place in places], _MAX_NAMED)
        for label, places in (("only before", comparison.only_before), ("only after", comparison.only_after))
        if places
    }
    tables: list[RenderableType] = [_table(layers)] if layers else []
    tables += [labelled(others.items())] if others else []
    sections = spaced(
        [Text.assemble(badge, " ", literal(comparison.headline, "bold"))],
        [labelled([("before", comparison.before), ("after", comparison.after)])],
        [labelled((change.name, describe_change(change)) for change in changes)] if changes else [],
        [literal(describe_layers(comparison), "dim"), *tables],
    )
    print_parts(sections, console)


def describe_change(change: ChangedFact) -> str:
    """Return the fact before and after; a replay's grade in words."""
    words = GRADES if change.name == "replay" else {}
    return " -> ".join(words.get(value, brief(value)) if value else "none" for value in (change.before, change.after))


def describe_layers(comparison: Comparison) -> str:
    """Return how many of the calls that both reports have changed."""
    if not comparison.layers:
        compared = plural(comparison.num_shared, "call")
        return f"No call changed by a factor of 1.4 or more ({compared} that both made)."
    count, shown = len(comparison.layers), min(len(comparison.layers), _MAX_LAYERS)
    first = f", the first {shown}" if shown < count else ""
    return f"{part_of(count, comparison.num_shared, 'call')} changed (absmax in the replay, headroom in bits){first}"


def _table(changes: Sequence[LayerChange]) -> FittedTable:
    before = [_size(change.absmax_before, finite=change.finite_before) for change in changes]
    after = [_size(change.absmax_after, finite=change.finite_after) for change in changes]
    times = [_times(change) for change in changes]
    headroom = [bits_text(change.headroom_after) for change in changes]
    columns = (
        Column("layer", [brief(change.place.label) for change in changes], least=_MIN_NAME_WIDTH),
        Column("before", before, right=True),
        Column("after", after, right=True),
        Column("times", times, right=True, spare=2),
        Column("headroom", headroom, right=True, spare=1),
    )
    styles = {(False, True): "green", (True, False): "red"}
    return FittedTable(columns, [styles.get((change.finite_before, change.finite_after), "") for change in changes])


def _times(change: LayerChange) -> str:
    """Return the growth of a magnitude; "-" if either call was non-finite, whose largest finite value says nothing."""
    known = change.growth is not None and change.finite_before and change.finite_after
    return number(change.growth or 0.0) if known else "-"


def _size(absmax: float | None, *, finite: bool) -> str:
    if not finite:
        return "NaN/Inf"
    return "-" if absmax is None else number(absmax)
