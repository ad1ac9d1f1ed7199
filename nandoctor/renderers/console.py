"""The rich renderables that all commands print with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nandoctor.text import diff_kind, printable, printable_code, shorten

if TYPE_CHECKING:
    from nandoctor.renderers.facts import Fact

_ASCII_FALLBACKS = str.maketrans({"█": "#", "░": ".", "…": "~"})


class Encodable:
    """A renderable limited to what the console's encoding can write: Windows pipes a report in cp1252, for example.

    Characters are replaced one by one after the layout, so that columns stay aligned. The blanks that rich pads lines
    with are dropped.
    """

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self._content, options)):
            kept = line if isinstance(self._content, CodeLine) else _unpadded(line)
            yield from (_to_encoding(segment, options.encoding) for segment in kept) if options.ascii_only else kept
            yield Segment.line()


class CodeLine:
    """A line of a diff or of code to be copied as is: never wrapped, with its tabs and trailing blanks."""

    def __init__(self, line: str, style: str = "") -> None:
        self._line, self._style = printable_code(line), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self._line, console.get_style(self._style))
        yield Segment.line()


def print_parts(parts: Iterable[RenderableType], console: Console, *, crop: bool = True) -> None:
    """Print renderables one below the other; without `crop`, lines that never wrap go past the edge."""
    for part in parts:
        console.print(Encodable(part), highlight=False, crop=crop)


def spaced(*sections: Sequence[RenderableType]) -> Iterator[RenderableType]:
    """Yield the renderables of all sections, with a blank line between sections that are not empty."""
    for place, section in enumerate(filter(None, sections)):
        yield from (*[Text()] * bool(place), *section)


def diff_style(line: str) -> str:
    """Return the style of a line of a diff."""
    return {"file": "bold", "del": "red", "add": "green", "hunk": "cyan"}.get(diff_kind(line), "")


def _unpadded(line: list[Segment]) -> list[Segment]:
    """Return the segments of a line without its trailing blanks; a control code ends them, and a visible background."""
    kept = list(line)
    while kept and not kept[-1].is_control and (kept[-1].style is None or kept[-1].style.bgcolor is None):
        last = kept.pop()
        if text := last.text.rstrip(" "):
            return [*kept, Segment(text, last.style)]
    return kept


def _to_encoding(segment: Segment, encoding: str) -> Segment:
    text = segment.text.translate(_ASCII_FALLBACKS).encode(encoding, "replace").decode(encoding)
    return Segment(text, segment.style, segment.control)


def literal(text: str, style: str = "") -> Text:
    """Return text to show as is: without markup, and unable to move the cursor or start a new line."""
    return Text(printable(text), style=style)


_GAP = 2


def plain_table() -> Table:
    """Return an empty table without lines."""
    return Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a `FittedTable`; a cell that is a `Text` has its own style.

    If the table is too wide, `short` replaces heading and cells; then cells are cut in the middle, down to `least`
    terminal columns (None: never); then columns are left out, those with the largest `spare` first (0: never).
    """

    heading: str
    cells: Sequence[str | Text]
    _: KW_ONLY
    right: bool = False
    short: tuple[str, Sequence[str]] | None = None
    least: int | None = None
    spare: int = 0

    @property
    def width(self) -> int:
        """The terminal columns that it takes uncut."""
        return max(cell_len(str(cell)) for cell in (self.heading, *self.cells))

    @property
    def least_width(self) -> int:
        """The fewest terminal columns that its cells can be cut to."""
        return self.width if self.least is None else min(self.width, self.least)


class FittedTable:
    """A table without lines that fits the window, by shorter names and, if need be, fewer columns."""

    def __init__(self, columns: Sequence[Column], styles: Sequence[str] = ()) -> None:
        self._columns = columns
        self._styles = styles

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, widths = self._fit(options.max_width)
        table = plain_table()
        for column, width in zip(shown, widths, strict=True):
            justify: JustifyMethod = "right" if column.right else "left"
            table.add_column(_fit_cell(column.heading, width), justify=justify, no_wrap=True)
        rows = zip(*(column.cells for column in shown), strict=True)
        for row, style in zip_longest(rows, self._styles, fillvalue=""):
            table.add_row(*map(_fit_cell, row, widths), style=style)
        yield table

    def _fit(self, window: int) -> tuple[list[Column], list[int]]:
        """Return the columns to show and their widths."""
        shown = list(self._columns)
        if _excess([column.width for column in shown], window) > 0:
            shown = [replace(it, heading=it.short[0], cells=it.short[1]) if it.short else it for it in shown]
        while _excess([column.least_width for column in shown], window) > 0 and any(column.spare for column in shown):
            shown.remove(max(shown, key=lambda column: column.spare))
        widths = [column.width for column in shown]
        for _ in range(_excess(widths, window)):
            slack = [width if width > column.least_width else 0 for column, width in zip(shown, widths, strict=True)]
            widths[slack.index(max(slack))] -= bool(max(slack))
        return shown, widths


def _excess(widths: Sequence[int], window: int) -> int:
    return sum(widths) + _GAP * (len(widths) - 1) - window


def _fit_cell(cell: str | Text, width: int) -> Text:
    if isinstance(cell, Text):
        return cell
    room, text = width, printable(cell)
    while cell_len(shown := shorten(text, room)) > width:
        room -= 1
    return literal(shown)


def labelled(lines: Iterable[tuple[str, str | Text]]) -> Table:
    """Return a grid of labels and sentences; a long sentence wraps in its own column."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(literal(label, "dim"), literal(text) if isinstance(text, str) else text)
    return grid


def unbroken(line: str, style: str = "") -> Text:
    """Return a line that never wraps, and may go past the edge."""
    return Text(printable(line), style, no_wrap=True, overflow="ignore")


_LABEL_WIDTH = 12
"""The longest label of a report, so that the sentences of all its parts are aligned."""


def fact_rows(facts: Sequence[Fact], indent: str = "") -> Iterator[RenderableType]:
    """Yield labels and sentences, aligned; a command is never wrapped."""
    width = max((_LABEL_WIDTH, *(len(fact.label) for fact in facts)))
    before = ""
    for fact in facts:
        label = "" if fact.label == before else fact.label
        before = fact.label
        if fact.is_command:
            row = unbroken(f"{indent}{label:<{width}}  {fact.text}")
            row.stylize("dim", 0, width + len(indent))
            yield row
        else:
            yield Padding(labelled([(f"{label:<{width}}", fact.text)]), (0, 0, 0, len(indent)), expand=False)
