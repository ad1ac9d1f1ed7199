"""Draw a document on a terminal, or into a pipe: rich renderables that fit the window."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text as Letters

from nandoctor.renderers.blocks import (
    Block,
    Cell,
    Column,
    Excerpt,
    Facts,
    Headline,
    Patch,
    Plot,
    Section,
    Table,
    Text,
)
from nandoctor.renderers.excerpt import excerpt_lines
from nandoctor.text import diff_kind, printable, printable_code, shorten

_INDENT = "  "
_GAP = 2
_LABEL_WIDTH = 12
"""The longest label of a report, so that the sentences of all its parts are aligned."""
_TEXT_WIDTH = 88  # longer lines are hard to read
_BAR_WIDTH = 5
_MAX_ROWS = 20
_TONES = {"": "", "good": "green", "unclear": "yellow", "failed": "red", "first": "bold red"}
_CODE_STYLES = {"context": "dim", "marked": "", "caret": "bold red"}
_DIFF_STYLES = {"file": "bold", "del": "red", "add": "green", "hunk": "cyan"}
_ASCII_FALLBACKS = str.maketrans({"█": "#", "░": ".", "…": "~"})


def print_document(blocks: Iterable[Block], console: Console, *, goes_on: bool = False) -> None:
    """Print blocks, with a blank line between any two; `goes_on` if others stand above them already."""
    for place, block in enumerate(blocks):
        if place or goes_on:
            console.print()
        for part in _draw(block, console.width):
            # Lines to be copied never wrap, and may go past the edge.
            console.print(_Encodable(part), highlight=False, crop=False)


def plain_text(blocks: Iterable[Block], width: int = 100) -> str:
    """Return the document as text without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        print_document(blocks, console)
    return captured.get()


def _draw(block: Block, width: int) -> Iterator[RenderableType]:
    return _DRAWN_BY[type(block)](block, width)


def _draw_headline(block: Headline, _: int) -> Iterator[RenderableType]:
    style = f"bold {_TONES[block.tone]}"
    if block.word:
        yield Letters.assemble((block.word, style), " ", printable(block.text))
    else:
        yield _literal(block.text, style)


def _draw_section(block: Section, width: int) -> Iterator[RenderableType]:
    if block.title:
        yield _literal(block.title, "bold")
    for place, inner in enumerate(block.blocks):
        if place and isinstance(inner, Table | Section):
            yield Letters()
        yield from _draw(inner, width)


def _draw_excerpt(block: Excerpt, width: int) -> Iterator[RenderableType]:
    if block.place or block.where:
        place = Letters(printable(block.place), style=Style(link=block.link or None, bold=True))
        comma = ", " if block.place and block.where else ""
        yield _indented(Letters.assemble(place, comma, printable(block.where)))
    for line in excerpt_lines(block, width - len(_INDENT)):
        text = _unbroken(f"{_INDENT}{line.whole}", _CODE_STYLES[line.kind])
        if line.kind == "caret":
            text.stylize("not bold dim default", 0, text.plain.index("|") + 1)
        yield text


def _draw_facts(block: Facts, _: int) -> Iterator[RenderableType]:
    """Yield labels and sentences, aligned; a command is never wrapped."""
    width = max((_LABEL_WIDTH, *(cell_len(printable(fact.label)) for fact in block.facts)))
    before = ""
    for fact in block.facts:
        label = "" if fact.label == before else printable(fact.label)
        before = fact.label
        if fact.is_command:
            row = _unbroken(f"{_INDENT}{label:<{width}}  {printable(fact.text)}")
            row.stylize("dim", 0, width + len(_INDENT))
            yield row
            continue
        grid = Grid.grid(padding=(0, _GAP, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(_literal(f"{label:<{width}}", "dim"), _literal(fact.text))
        yield _indented(grid)


def _draw_patch(block: Patch, _: int) -> Iterator[RenderableType]:
    for line in block.lines:
        yield _CodeLine(line, _DIFF_STYLES.get(diff_kind(line), "") if block.is_diff else "")


def _draw_table(block: Table, width: int) -> Iterator[RenderableType]:
    """Yield a table without lines that fits the window, by shorter names and, if need be, fewer columns."""
    shown = block.near_first(_MAX_ROWS)
    if block.title:
        yield _literal(block.title, "dim")
    if block.columns:
        columns, widths = _fit(shown.columns, width)
        grid = Grid(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for column, most in zip(columns, widths, strict=True):
            justify: JustifyMethod = "right" if column.right else "left"
            grid.add_column(_fit_cell(column.heading, most), justify=justify, no_wrap=True)
        for tone, row in replace(shown, columns=columns).rows():
            grid.add_row(*map(_fit_cell, row, widths), style=_TONES[tone])
        yield grid
    if shown.legend:
        yield _literal(shown.legend, "dim")


def _draw_plot(block: Plot, _: int) -> Iterator[RenderableType]:
    yield _literal(f"{_INDENT}{block.hint}", "dim")


def _draw_text(block: Text, _: int) -> Iterator[RenderableType]:
    text = _literal(block.text)
    text.highlight_regex(r"`[^`]+`", "cyan")
    yield Constrain(_indented(text), _TEXT_WIDTH)


_DRAWN_BY: Mapping[type, Callable[[Any, int], Iterator[RenderableType]]] = {
    Headline: _draw_headline,
    Section: _draw_section,
    Excerpt: _draw_excerpt,
    Facts: _draw_facts,
    Patch: _draw_patch,
    Table: _draw_table,
    Plot: _draw_plot,
    Text: _draw_text,
}


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, len(_INDENT)), expand=False)


def _literal(text: str, style: str = "") -> Letters:
    """Return text to show as is: without markup, and unable to move the cursor or start a new line."""
    return Letters(printable(text), style=style)


def _unbroken(line: str, style: str = "") -> Letters:
    """Return a line that never wraps, and may go past the edge."""
    return Letters(printable(line), style, no_wrap=True, overflow="ignore")


class _Encodable:
    """A renderable limited to what the console's encoding can write: Windows pipes a report in cp1252, for example.

    Characters are replaced one by one after the layout, so that columns stay aligned. The blanks that rich pads lines
    with are dropped.
    """

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self._content, options)):
            kept = line if isinstance(self._content, _CodeLine) else _unpadded(line)
            yield from (_to_encoding(segment, options.encoding) for segment in kept) if options.ascii_only else kept
            yield Segment.line()


class _CodeLine:
    """A line of a diff or of code to be copied as is: never wrapped, with its tabs and trailing blanks."""

    def __init__(self, line: str, style: str = "") -> None:
        self._line, self._style = printable_code(line), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self._line, console.get_style(self._style))
        yield Segment.line()


def _unpadded(line: list[Segment]) -> list[Segment]:
    """Return the segments of a line without its trailing blanks; a control code ends them."""
    kept = list(line)
    while kept and not kept[-1].is_control:
        last = kept.pop()
        if text := last.text.rstrip(" "):
            return [*kept, Segment(text, last.style)]
    return kept


def _to_encoding(segment: Segment, encoding: str) -> Segment:
    text = segment.text.translate(_ASCII_FALLBACKS).encode(encoding, "replace").decode(encoding)
    return Segment(text, segment.style, segment.control)


def _fit(columns: Sequence[Column], window: int) -> tuple[list[Column], list[int]]:
    """Return the columns to show and their widths."""
    shown = list(columns)
    if _excess([_width(column) for column in shown], window) > 0:
        shown = [replace(it, heading=it.short[0], cells=it.short[1]) if it.short else it for it in shown]
    while _excess(list(map(_least_width, shown)), window) > 0 and any(column.spare for column in shown):
        shown.remove(max(shown, key=lambda column: column.spare))
    widths = list(map(_width, shown))
    for _ in range(_excess(widths, window)):
        slack = [width if width > _least_width(column) else 0 for column, width in zip(shown, widths, strict=True)]
        widths[slack.index(max(slack))] -= bool(max(slack))
    return shown, widths


def _width(column: Column) -> int:
    """Return the terminal columns that it takes uncut."""
    return max(cell_len(_letters(cell).plain) for cell in (column.heading, *column.cells))


def _least_width(column: Column) -> int:
    return _width(column) if column.least is None else min(_width(column), column.least)


def _excess(widths: Sequence[int], window: int) -> int:
    return sum(widths) + _GAP * (len(widths) - 1) - window


def _letters(cell: str | Cell) -> Letters:
    """Return a cell uncut; a cell with room has its number and a bar of five letters."""
    if isinstance(cell, str):
        return _literal(cell)
    if cell.room is None:
        return _literal(cell.text, _TONES[cell.tone])
    bar = ("█" * round(cell.room * _BAR_WIDTH)).ljust(_BAR_WIDTH, "░")
    return Letters.assemble(f"{printable(cell.text):>{_BAR_WIDTH}} ", (bar, _TONES[cell.tone]))


def _fit_cell(cell: str | Cell, width: int) -> Letters:
    if isinstance(cell, Cell):
        return _letters(cell)
    room, text = width, printable(cell)
    while cell_len(shown := shorten(text, room)) > width:
        room -= 1
    return _literal(shown)
