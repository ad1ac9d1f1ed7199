"""The few shapes that reports and inspections share on a terminal."""

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

_PLAINER = str.maketrans({"█": "#", "░": ".", "…": "~"})


class Encodable:
    """A renderable whose letters the console's encoding can write: a report piped on Windows goes out in cp1252.

    Letters are replaced one by one, after the layout, so that columns stay aligned. What rich pads a line with is left
    out, so that piped text ends where it ends.
    """

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self._content, options)):
            kept = line if isinstance(self._content, CodeLine) else _unpadded(line)
            yield from (_plainer(segment, options.encoding) for segment in kept) if options.ascii_only else kept
            yield Segment.line()


class CodeLine:
    """A line of a diff or of code as it was written, to be copied: never broken, its tabs and its blanks kept."""

    def __init__(self, line: str, style: str = "") -> None:
        self._line, self._style = printable_code(line), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self._line, console.get_style(self._style))
        yield Segment.line()


def print_parts(parts: Iterable[RenderableType], console: Console, *, crop: bool = True) -> None:
    """Print renderables one below the other; without `crop` what is never broken goes past the edge."""
    for part in parts:
        console.print(Encodable(part), highlight=False, crop=crop)


def spaced(*sections: Sequence[RenderableType]) -> Iterator[RenderableType]:
    """The renderables of the sections that have some, a blank line between two sections."""
    for place, section in enumerate(filter(None, sections)):
        yield from (*[Text()] * bool(place), *section)


def diff_style(line: str) -> str:
    """The style of a line of a diff."""
    return {"file": "bold", "del": "red", "add": "green", "hunk": "cyan"}.get(diff_kind(line), "")


def _unpadded(line: list[Segment]) -> list[Segment]:
    """The segments of a line without the blanks at its end; control codes have no text that shows."""
    kept = list(line)
    while kept and not kept[-1].is_control and not kept[-1].text.strip(" ") and not _is_filled(kept[-1]):
        kept.pop()
    if kept and not kept[-1].is_control and not _is_filled(kept[-1]):
        kept[-1] = Segment(kept[-1].text.rstrip(" "), kept[-1].style)
    return kept


def _is_filled(segment: Segment) -> bool:
    """Tell whether blanks of this segment can be seen, as those of a badge."""
    return segment.style is not None and segment.style.bgcolor is not None


def _plainer(segment: Segment, encoding: str) -> Segment:
    text = segment.text.translate(_PLAINER).encode(encoding, "replace").decode(encoding)
    return Segment(text, segment.style, segment.control)


def literal(text: str, style: str = "") -> Text:
    """Text shown as it is: no markup, and nothing in it can move the cursor or start a new line."""
    return Text(printable(text), style=style)


_GAP = 2


def plain_table() -> Table:
    """A table without lines."""
    return Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a `FittedTable`; a cell that is a `Text` has its own style.

    Where the table is too wide, `short` stands in for heading and cells; then cells are cut in their middle, down to
    `least` columns of the terminal (None: never); then the column is left out, those with the largest `spare` first
    (0: never).
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
        """The columns of the terminal that it takes as it is."""
        return max(cell_len(str(cell)) for cell in (self.heading, *self.cells))

    @property
    def least_width(self) -> int:
        """The fewest that its cells can be cut to."""
        return self.width if self.least is None else min(self.width, self.least)


class FittedTable:
    """A table without lines that fits the window: by shorter names, and by fewer columns where that is not enough."""

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
        """The columns that are shown, and how wide each of them is."""
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
    """Sentences behind their labels; a long one goes on below itself, not below its label."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(literal(label, "dim"), literal(text) if isinstance(text, str) else text)
    return grid


def unbroken(line: str, style: str = "") -> Text:
    """A line that is never broken, and may go past the edge."""
    text = literal(line, style)
    text.no_wrap, text.overflow = True, "ignore"
    return text


_LABEL_WIDTH = 12
"""As wide as the longest of a report, so that the sentences of all its parts stand in one column."""


def fact_rows(facts: Sequence[Fact], indent: str = "") -> Iterator[RenderableType]:
    """Labels and sentences, all aligned; a command stands on a line of its own."""
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
