"""Draw a document on a terminal, or into a pipe: styled lines that fit the window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text as Letters

from nandoctor.text import diff_kind, printable, printable_code, shorten
from nandoctor.views.blocks import (
    Block,
    Column,
    Excerpt,
    Facts,
    Headline,
    Patch,
    Section,
    Table,
    Text,
    Tone,
    excerpt_lines,
)

_INDENT = "  "
_GAP = "  "
_LABEL_WIDTH = 12
"""The longest label of a report, so that the sentences of all its parts are aligned."""
_TEXT_WIDTH = 88  # longer lines are hard to read
_MAX_ROWS = 20
_TONES = {"": "", "good": "green", "unclear": "yellow", "failed": "red", "first": "bold red"}
_CODE_STYLES = {"context": "dim", "marked": "", "caret": "bold red"}
_DIFF_STYLES = {"file": "bold", "del": "red", "add": "green", "hunk": "cyan"}


def print_document(blocks: Iterable[Block], console: Console, *, goes_on: bool = False) -> None:
    """Print blocks, with a blank line between any two; `goes_on` if others stand above them already."""
    for lines in filter(None, ([*_draw(block, console)] for block in blocks)):
        if goes_on:
            console.print()
        goes_on = True
        for line in lines:
            # Lines to be copied never wrap, and may go past the edge.
            console.print(_Line(line), highlight=False, crop=False)


class _Line:
    """A whole line, with its tabs, limited to what the console can write: Windows pipes a report in cp1252."""

    def __init__(self, letters: Letters) -> None:
        self._letters = letters

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.ascii_only:  # any encoding but Unicode's; one letter for one keeps columns aligned
            self._letters.plain = self._letters.plain.encode(options.encoding, "replace").decode(options.encoding)
        yield from self._letters.render(console, end="\n")


def _draw(block: Block, console: Console) -> Iterator[Letters]:
    """Yield the lines of a block."""
    match block:
        case Headline():
            style = f"bold {_TONES[block.tone]}"
            with_word = Letters.assemble((block.word, style), " ", printable(block.text))
            yield from _wrapped(with_word if block.word else _literal(block.text, style), console)
        case Section():
            yield from _draw_section(block, console)
        case Excerpt():
            yield from _draw_excerpt(block, console)
        case Facts():
            yield from _draw_facts(block, console)
        case Patch():
            for line in block.lines:
                yield Letters(printable_code(line), _DIFF_STYLES.get(diff_kind(line), "") if block.is_diff else "")
        case Table():
            yield from _draw_table(block, console)
        case Text():
            text = _literal(block.text)
            text.highlight_regex(r"`[^`]+`", "cyan")
            yield from _wrapped(text, console, _INDENT)


def _draw_section(block: Section, console: Console) -> Iterator[Letters]:
    if block.title:
        yield from _wrapped(_literal(block.title, "bold"), console)
    for place, inner in enumerate(block.blocks):
        if place and isinstance(inner, Table | Section):
            yield Letters()
        yield from _draw(inner, console)


def _draw_excerpt(block: Excerpt, console: Console) -> Iterator[Letters]:
    if block.place or block.where:
        place = Letters(printable(block.place), style=Style(link=block.link or None, bold=True))
        comma = ", " if block.place and block.where else ""
        yield from _wrapped(Letters.assemble(place, comma, printable(block.where)), console, _INDENT)
    for line in excerpt_lines(block, console.width - len(_INDENT)):
        text = Letters(f"{_INDENT}{line.whole}", _CODE_STYLES[line.kind])
        if line.kind == "caret":
            text.stylize("not bold dim default", 0, text.plain.index("|") + 1)
        yield text


def _draw_facts(block: Facts, console: Console) -> Iterator[Letters]:
    """Yield labels and sentences, aligned; a command is never wrapped."""
    width = max((_LABEL_WIDTH, *(cell_len(printable(fact.label)) for fact in block.facts)))
    before = ""
    for fact in block.facts:
        label = "" if fact.label == before else printable(fact.label)
        before = fact.label
        start = f"{_INDENT}{label:<{width}}{_GAP}"
        text = _literal(fact.text)
        for line in [text] if fact.is_command else _lines(text, console, console.width - len(start)):
            yield Letters.assemble((start, "dim"), line)
            start = " " * len(start)


def _draw_table(block: Table, console: Console) -> Iterator[Letters]:
    """Yield a table without lines that fits the window, by shorter names and, if need be, fewer columns."""
    shown = block.near_first(_MAX_ROWS)
    if block.title:
        yield from _wrapped(_literal(block.title, "dim"), console)
    if block.columns:
        columns, widths = _fit(shown.columns, console.width)
        yield _row([(column.heading, "") for column in columns], columns, widths, "dim")
        for tone, row in replace(shown, columns=columns).rows():
            yield _row(row, columns, widths, _TONES[tone])
    if shown.legend:
        yield from _wrapped(_literal(shown.legend, "dim"), console)


def _literal(text: str, style: str = "") -> Letters:
    """Return text to show as is: without markup, and unable to move the cursor or start a new line."""
    return Letters(printable(text), style=style)


def _wrapped(text: Letters, console: Console, indent: str = "") -> Iterator[Letters]:
    """Yield the lines of a paragraph."""
    most = min(console.width, _TEXT_WIDTH) if indent else console.width
    yield from (Letters.assemble(indent, line) for line in _lines(text, console, most - len(indent)))


def _lines(text: Letters, console: Console, width: int) -> Iterator[Letters]:
    for line in text.wrap(console, max(width, 1)):
        line.rstrip()
        yield line


def _row(cells: Sequence[tuple[str, Tone]], columns: Sequence[Column], widths: Sequence[int], style: str) -> Letters:
    line = Letters(style=style)
    for (text, tone), column, width in zip(cells, columns, widths, strict=True):
        letters = _literal(_cut(printable(text), width), _TONES[tone])
        letters.align("right" if column.right else "left", width)
        line.append(_GAP if line else "").append_text(letters)
    line.rstrip()
    return line


def _fit(columns: Sequence[Column], window: int) -> tuple[list[Column], list[int]]:
    """Return the columns to show and their widths."""
    shown = list(columns)
    while _excess(list(map(_least_width, shown)), window) > 0 and any(column.spare for column in shown):
        shown.remove(max(shown, key=lambda column: column.spare))
    widths = list(map(_width, shown))
    for _ in range(_excess(widths, window)):
        slack = [width if width > _least_width(column) else 0 for column, width in zip(shown, widths, strict=True)]
        widths[slack.index(max(slack))] -= bool(max(slack))
    return shown, widths


def _width(column: Column) -> int:
    """Return the terminal columns that it takes uncut."""
    return max(cell_len(printable(cell)) for cell in (column.heading, *column.cells))


def _least_width(column: Column) -> int:
    return _width(column) if column.least is None else min(_width(column), column.least)


def _excess(widths: Sequence[int], window: int) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1) - window


def _cut(text: str, width: int) -> str:
    """Return the text, shortened in its middle to so many terminal columns."""
    room = width
    while cell_len(shown := shorten(text, room)) > width:
        room -= 1
    return shown
