"""What `nandoctor diff` prints: two reports side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nandoctor.evidence.report_diff import Change, Comparison, LayerChange
from nandoctor.renderers.console import labelled, literal, plain_table, print_parts
from nandoctor.renderers.facts import GRADES
from nandoctor.renderers.verdicts import FAILED, GOOD, UNCLEAR
from nandoctor.text import bits_text, brief, join_first, number, part_of, plural

_MAX_LAYERS = 12
_MAX_NAMED = 3
_MIN_NAME_WIDTH = 16
_NUMBERS_WIDTH = 44
_TONES = {"fixed": GOOD, "both-finite": GOOD, "same-failure": UNCLEAR, "broken": FAILED, "moved": FAILED}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the outcome, the facts that changed, and the layers that changed most."""
    print_parts(_parts(comparison, console.width), console)


def _parts(comparison: Comparison, width: int) -> Iterator[Table | Text]:
    badge = Text(f" {comparison.outcome.upper()} ", style=_TONES[comparison.outcome].badge)
    yield Text.assemble(badge, " ", literal(comparison.headline, "bold"))
    yield Text()
    yield labelled([("before", comparison.before), ("after", comparison.after)])
    if comparison.changes:
        yield Text()
        yield labelled((change.name, describe_change(change)) for change in comparison.changes)
    yield Text()
    if comparison.layers:
        yield literal(_describe_layers(comparison), "dim")
        yield _table(comparison.layers[:_MAX_LAYERS], width)
    else:
        compared = plural(comparison.num_shared, "call")
        yield literal(f"No call changed by a factor of 1.4 or more ({compared} that both made).", "dim")
    if others := list(_others(comparison)):
        yield labelled(others)


def describe_change(change: Change) -> str:
    """What a fact was and is; the grade of a replay in words."""
    words = GRADES if change.name == "replay" else {}
    return " -> ".join(words.get(value, value) if value else "none" for value in (change.before, change.after))


def _describe_layers(comparison: Comparison) -> str:
    count, shown = len(comparison.layers), min(len(comparison.layers), _MAX_LAYERS)
    first = f", the first {shown}" if shown < count else ""
    return f"{part_of(count, comparison.num_shared, 'call')} changed (absmax in the replay, headroom in bits){first}"


def _others(comparison: Comparison) -> Iterator[tuple[str, str]]:
    for label, places in (("only before", comparison.only_before), ("only after", comparison.only_after)):
        if places:
            listed = join_first([brief(place.label, _NUMBERS_WIDTH) for place in places], _MAX_NAMED)
            yield label, listed


def _table(changes: Sequence[LayerChange], width: int) -> Table:
    table = plain_table()
    table.add_column("layer", no_wrap=True)
    for heading in ("before", "after", "times", "headroom"):
        table.add_column(heading, no_wrap=True, justify="right")
    name_width = max(_MIN_NAME_WIDTH, width - _NUMBERS_WIDTH)
    for change in changes:
        cells = (brief(change.place.label, name_width), *_values(change))
        table.add_row(*map(literal, cells), style=_style(change))
    return table


def _values(change: LayerChange) -> tuple[str, ...]:
    return (
        _size(change.absmax_before, finite=change.finite_before),
        _size(change.absmax_after, finite=change.finite_after),
        "-" if change.growth is None else number(change.growth),
        bits_text(change.headroom_after),
    )


def _size(absmax: float | None, *, finite: bool) -> str:
    if not finite:
        return "NaN/Inf"
    return "-" if absmax is None else number(absmax)


def _style(change: LayerChange) -> str:
    if change.finite_before == change.finite_after:
        return ""
    return "green" if change.finite_after else "red"
