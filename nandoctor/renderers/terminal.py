"""The report on a terminal, on one screen.

In: a `Report`. Out: text on a rich console, or a single line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from nandoctor.evidence.report import Report
from nandoctor.renderers.console import Encodable, labelled, literal
from nandoctor.renderers.facts import list_facts
from nandoctor.renderers.fix_facts import fix_facts
from nandoctor.renderers.table import LayerTable, TableRow, make_table
from nandoctor.renderers.verdicts import VERDICTS
from nandoctor.text import printable, shorten

_JUSTIFY: Sequence[JustifyMethod] = ("left", "left", "right", "right", "right", "left")
_MAX_NOTES = 4
_LAYERS_BESIDE_FIXES = 2
_LESS_THAN_A_FIX = ("input", "in fp32", "path")  # all has to fit on one screen
_BAR_WIDTH = 5
_TIGHT_BITS = 1.0

_GAP = 2
_NUMBERS_WIDTH = 2 * (8 + _GAP) + (7 + _GAP) + 6 + _BAR_WIDTH  # "8.12e+06" and "NaN ±Inf", "rel err", "-12.3 " and bar
_MIN_NAME_WIDTH, _MIN_TYPE_WIDTH = 12, 10


def one_line(report: Report) -> str:
    """The dump, the verdict and the headline, for `--quiet` and for scripts that read many."""
    return printable(f"{report.dump.path}: {report.verdict}: {report.headline}")


def print_report(report: Report, console: Console) -> None:
    """Print the verdict, the first non-finite layer with the layers around it, and what to do next."""
    for part in _parts(report, console.width):
        console.print(Encodable(part), highlight=False)


def _parts(report: Report, width: int) -> Iterator[Table | Text]:
    yield _verdict(report)
    yield literal(report.headline, "bold")
    yield Text()
    fixes = fix_facts(report)
    left_out = _LESS_THAN_A_FIX if fixes else ()
    yield labelled((fact.label, fact.text) for fact in list_facts(report) if fact.label not in left_out)
    if fixes:
        yield Text()
        yield labelled((fact.label, fact.text) for fact in fixes)
    table = make_table(report, before=_LAYERS_BESIDE_FIXES, after=1) if fixes else make_table(report)
    if table is not None:
        yield Text()
        yield literal(table.title, "dim")
        yield _layers(table, width)
        if table.legend:
            yield literal(table.legend, "dim")
    advice = [*_capped("note", report.notes), *_capped("next", report.next_steps)]
    if advice:
        yield Text()
        yield labelled(advice)


def _verdict(report: Report) -> Text:
    verdict = VERDICTS[report.verdict]
    return Text.assemble(Text(f" {report.verdict.upper()} ", style=verdict.tone.badge), f" {verdict.meaning}")


def _capped(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from ((label, text) for text in texts[:_MAX_NOTES])
    if len(texts) > _MAX_NOTES:
        yield "", f"{len(texts) - _MAX_NOTES} more in the report (-o report.json)"


def _layers(layers: LayerTable, width: int) -> Table:
    """The table, fitted to `width`: names lose the path they share, then their middle."""
    room = width - _NUMBERS_WIDTH - 2 * _GAP - len("> ")
    type_width = min(max(len(row.type) for row in layers.rows), max(_MIN_TYPE_WIDTH, room // 3))
    name_width = max(_MIN_NAME_WIDTH, room - type_width)
    common = layers.common if any(len(row.layer) > name_width for row in layers.rows) else ""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    name_heading = shorten(f"in {common[:-1]}", name_width) if common else layers.headings[0]
    for heading, justify in zip((f"  {name_heading}", *layers.headings[1:]), _JUSTIFY, strict=True):
        table.add_column(literal(heading), justify=justify, no_wrap=True)
    for row in layers.rows:
        name = f"{row.mark} {shorten(row.layer.removeprefix(common), name_width)}"
        cells = (name, shorten(row.type, type_width), row.autocast, row.fp32, row.rel_err)
        table.add_row(*map(literal, cells), _headroom(row, layers.full_bits), style=_row_style(row))
    return table


def _row_style(row: TableRow) -> str:
    if row.first_nonfinite:
        return "bold red"
    return "" if row.finite else "red"


def _headroom(row: TableRow, full_bits: int) -> Text:
    """The bits left before overflow and a bar of them; an empty bar is no room at all."""
    bits = row.headroom_bits
    if bits is None:
        return Text("-".rjust(5))
    filled = round(min(max(bits / full_bits, 0.0), 1.0) * _BAR_WIDTH)
    style = "red" if bits < 0 else "yellow" if bits < _TIGHT_BITS else "green"
    bar = ("█" * filled).ljust(_BAR_WIDTH, "░")
    return Text.assemble(f"{bits:5.1f} ", (bar, style))
