"""Print the report on one screen of a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.text import Text

from nandoctor.evidence.report import Report
from nandoctor.renderers.answer import make_answer
from nandoctor.renderers.console import (
    CodeLine,
    Column,
    FittedTable,
    diff_style,
    fact_rows,
    literal,
    print_parts,
    unbroken,
)
from nandoctor.renderers.facts import Fact, describe_fp32_error, detail_facts, evidence_facts, next_facts, note_facts
from nandoctor.renderers.fix_facts import summarize_fixes
from nandoctor.renderers.table import LayerTable, TableRow, make_table
from nandoctor.renderers.trial_facts import trial_facts
from nandoctor.renderers.verdicts import VERDICTS

_MAX_NOTES = 4
_HIDDEN_BESIDE_FIXES = frozenset({"input", "in fp32", "path"})  # all has to fit on one screen
_HIDDEN_BESIDE_VERIFIED = _HIDDEN_BESIDE_FIXES | {"cause", "extent"}
_CONTEXT = 1
_INDENT = "  "
_CODE_STYLES = {"context": "dim", "marked": "", "caret": "bold red"}
_BAR_WIDTH = 5
_TIGHT_BITS = 1.0

_MIN_NAME_WIDTH, _MIN_TYPE_WIDTH = 14, 10


def print_report(report: Report, console: Console, *, told: bool = False, has_page: bool = False) -> None:
    """Print cause, place, first fix, evidence and next step, and the layers if no fix is verified.

    `told` skips `answer_parts`, which were printed already; `has_page` skips how to make a page.
    """
    if not told:
        print_parts(answer_parts(report, console.width), console, crop=False)
    elif report.fp32_error is not None:  # known only after the search for fixes
        print_parts(fact_rows([Fact("fp32", describe_fp32_error(report.fp32_error))], _INDENT), console)
    print_parts(fix_parts(report), console, crop=False)
    print_parts(evidence_parts(report, has_page=has_page), console, crop=False)


def answer_parts(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield what the diagnosis found, before any search for fixes: cause, place, verdict, replay."""
    answer = make_answer(report, context=_CONTEXT, width=width - len(_INDENT))
    yield literal(answer.headline, f"bold {VERDICTS[report.verdict].tone.text}")
    yield Text()
    if answer.place or answer.where:
        place = Text(answer.place, style=Style(link=answer.link or None, bold=True))
        comma = ", " if answer.place and answer.where else ""
        yield Padding(Text.assemble(place, comma, answer.where), (0, 0, 0, len(_INDENT)), expand=False)
    for line in answer.code:
        text = unbroken(f"{_INDENT}{line.whole}", _CODE_STYLES[line.kind])
        if line.kind == "caret":
            text.stylize("not bold dim default", 0, text.plain.index("|") + 1)
        yield text
    yield from fact_rows(answer.facts, _INDENT)


def fix_parts(report: Report) -> Iterator[RenderableType]:
    """Yield the first verified fix with its lines, or what was tried."""
    fixes = summarize_fixes(report)
    if fixes is None:
        return
    yield Text()
    yield literal(fixes.heading, "bold")
    yield from (CodeLine(line, diff_style(line)) for line in fixes.patch)
    yield from fact_rows(fixes.facts, _INDENT)


def evidence_parts(report: Report, *, has_page: bool) -> Iterator[RenderableType]:
    """Yield the evidence, what else was tried, and what to do next; the layers if no fix was verified."""
    if any(fix.verified for fix in report.fixes):
        is_of_code = any(fix.verified and fix.kind != "data" for fix in report.fixes)
        table, left_out = None, _HIDDEN_BESIDE_VERIFIED if is_of_code else _HIDDEN_BESIDE_VERIFIED - {"cause"}
    elif report.fixes:
        table, left_out = make_table(report, before=2, after=1), _HIDDEN_BESIDE_FIXES
    else:
        table, left_out = make_table(report), frozenset()
    if _names_the_layer(report):
        left_out |= {"layers"}
    if table is not None and any(row.unholdable for row in table.rows):
        left_out |= {"too large"}
    evidence = [*evidence_facts(report), *trial_facts(report)]
    notes = note_facts(report)
    if len(notes) > _MAX_NOTES:
        more = f"{len(notes) - _MAX_NOTES} more in the report (-o report.json)"
        notes[_MAX_NOTES:] = [Fact("note", more)]
    last = [*detail_facts(report), *notes, *next_facts(report, page=not has_page)]
    evidence, last = ([fact for fact in facts if fact.label not in left_out] for facts in (evidence, last))
    if table is None:
        sections = [[*fact_rows([*evidence, *last], _INDENT)]]
    else:
        legend = [literal(table.legend, "dim")] if table.legend else []
        layers: list[RenderableType] = [literal(table.title, "dim"), _layers(table), *legend]
        sections = [[*fact_rows(evidence, _INDENT)], layers, [*fact_rows(last, _INDENT)]]
    for section in filter(None, sections):
        yield from (Text(), *section)


def _names_the_layer(report: Report) -> bool:
    """Return True if the answer's place, or the marked row of the table, names the first non-finite layer."""
    first, origin = report.first_nonfinite, report.origin
    if first is None or first.where != "output":
        return False
    solved = any(fix.verified for fix in report.fixes)
    return not solved or (origin is not None and origin.place.key == first.place.key)


def _layers(layers: LayerTable) -> FittedTable:
    rows = layers.rows
    name, kind, *numbers, headroom = layers.headings
    short = [f"{row.mark} {row.layer.removeprefix(layers.common)}" for row in rows]
    cells = [[getattr(row, field) for row in rows] for field in ("autocast", "fp32", "rel_err")]
    columns = (
        Column(
            f"  {name}",
            [f"{row.mark} {row.layer}" for row in rows],
            short=(f"  in {layers.common[:-1]}", short) if layers.common else None,
            least=_MIN_NAME_WIDTH,
        ),
        Column(kind, [row.type for row in rows], least=_MIN_TYPE_WIDTH, spare=3),
        *(
            Column(heading, column, right=True, spare=place)
            for place, (heading, column) in enumerate(zip(numbers, cells, strict=True))
        ),
        Column(headroom, [_headroom(row) for row in rows]),
    )
    return FittedTable(columns, ["bold red" if row.first_nonfinite else "" if row.finite else "red" for row in rows])


def _headroom(row: TableRow) -> Text:
    """Return the bits left before overflow and a bar of them; the bar is empty if there are none."""
    bits = row.headroom_bits
    if bits is None:
        return Text("-".rjust(5))
    style = "red" if bits < 0 else "yellow" if bits < _TIGHT_BITS else "green"
    bar = ("█" * round(row.room * _BAR_WIDTH)).ljust(_BAR_WIDTH, "░")
    return Text.assemble(f"{bits:5.1f} ", (bar, style))
