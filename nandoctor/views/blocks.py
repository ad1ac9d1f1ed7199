"""The document of anything that a command shows: blocks in their order, without a word on how they look.

Names from dumps and models stand in blocks as they are; every surface makes them printable and escapes them. Only the
lines of an `Excerpt` are laid out here, since they are alike on all surfaces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len, set_cell_size

from nandoctor.text import printable

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report, SourceExcerpt


Level = Literal["screen", "page"]
"""How much a document says: as much as fits on a screen or in a notebook's cell, or all of it."""

Tone = Literal["", "good", "unclear", "failed", "first"]
"""How good the news is; "first" is the failure to look at, among others."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The first sentence; `word` is the answer in a word or two, before it."""

    text: str
    _: KW_ONLY
    word: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The place to look at: "path:line" and its URI, the function and call in it, and the lines of source around.

    `place` and `link` are "" and `source` is None if no line is to blame. `remark` stands beside the carets.
    """

    place: str
    link: str
    where: str
    source: SourceExcerpt | None
    remark: str
    context: int


@dataclass(frozen=True, slots=True)
class Fact:
    """A label and a sentence or, with `is_command`, a line to type. `link` is where a page leads from the sentence."""

    label: str
    text: str
    _: KW_ONLY
    is_command: bool = False
    link: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and sentences, one below the other; a label that repeats is shown once."""

    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class Patch:
    """Lines to be copied as they are: a diff, or code."""

    lines: Sequence[str]
    _: KW_ONLY
    is_diff: bool = True


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; `tones` has one for each cell, or none.

    If a window is too narrow for the table, cells are cut in the middle, down to `least` letters (None: never); then
    columns are left out, those with the largest `spare` first (0: never).
    """

    heading: str
    cells: Sequence[str]
    _: KW_ONLY
    tones: Sequence[Tone] = ()
    right: bool = False
    least: int | None = None
    spare: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of equal length; `tones` has one for each row, or none.

    With `is_searchable` a page can search and sort it; the first two columns are names and types.
    """

    columns: Sequence[Column]
    title: str = ""
    legend: str = ""
    tones: Sequence[Tone] = ()
    is_searchable: bool = False

    def near_first(self, limit: int) -> Table:
        """Return the table itself or, of more than `limit` rows, those around the failure to look at."""
        count = len(self.columns[0].cells) if self.columns else 0
        if count <= limit:
            return self
        shown = window(list(self.tones).index("first") if "first" in self.tones else 0, count, limit)
        part = slice(shown.start, shown.stop)
        columns = [replace(column, cells=column.cells[part], tones=column.tones[part]) for column in self.columns]
        note = f"Rows {shown.start + 1:,} to {shown.stop:,} of {count:,}. {self.legend}".strip()
        return replace(self, columns=columns, tones=self.tones[part], legend=note)

    def rows(self) -> list[tuple[Tone, tuple[tuple[str, Tone], ...]]]:
        """Return the cells by row, each cell and each row with its tone."""
        toned = [zip(it.cells, it.tones or [""] * len(it.cells), strict=True) for it in self.columns]
        rows = list(zip(*toned, strict=True))
        return list(zip(self.tones or [""] * len(rows), rows, strict=True))


def window(center: int, count: int, limit: int) -> range:
    """Return at most `limit` of `count` indices around one, moved inwards at either end so that they are as many."""
    start = max(min(center - limit // 2, count - limit), 0)
    return range(start, min(start + limit, count))


@dataclass(frozen=True, slots=True)
class Plot:
    """The plot of the report; `hint` says how to get it where nothing can be drawn."""

    report: Report
    hint: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks that belong together; if it is `folded`, all but its title is hidden until one asks.

    A page, which has a list of contents, opens its own sections; the list has the title up to a comma or a colon.
    """

    title: str
    blocks: Sequence[Block]
    _: KW_ONLY
    folded: bool = False


Block = Headline | Excerpt | Facts | Patch | Table | Plot | Text | Section


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcerptLine:
    """A numbered line of source, or the carets below one with a remark beside them. The text is printable."""

    text: str
    kind: Literal["context", "marked", "caret"]
    remark: str = ""

    @property
    def whole(self) -> str:
        """The line as plain text."""
        return f"{self.text} {self.remark}" if self.remark else self.text


def excerpt_lines(block: Excerpt, width: int | None = None) -> Iterator[ExcerptLine]:
    """Yield numbered lines, cut to `width` columns, with ">" before those of the expression and carets below it."""
    excerpt = block.source
    if excerpt is None:
        return
    last = excerpt.first + len(excerpt.lines) - 1
    shown = range(max(excerpt.first, excerpt.line - block.context), min(last, excerpt.end_line + block.context) + 1)
    texts = {number: printable(excerpt.lines[number - excerpt.first]) for number in shown}
    dent = min((len(text) - len(text.lstrip()) for text in texts.values() if text), default=0)
    gutter = len(str(shown.stop - 1))
    room = sys.maxsize if width is None else max(width - gutter - len("> ") - len(" | "), 20)
    hidden = _hidden(excerpt, dent, room)
    start = dent + hidden
    for number, text in texts.items():
        inside = excerpt.line <= number <= excerpt.end_line
        seen = f"{'…' if hidden else text[start : start + 1]}{text[start + 1 :]}" if text[dent:] else ""
        if text or inside:
            cut = seen if cell_len(seen) <= room else f"{set_cell_size(seen, room - 1)}…"
            line = f"{'>' if inside else ' '} {number:>{gutter}} | {cut}"
            yield ExcerptLine(text=line.rstrip(), kind="marked" if inside else "context")
        if inside and (caret := _carets(excerpt, number, text, start, seen)):
            note, blank = printable(block.remark) if number == excerpt.end_line else "", f"  {'':>{gutter}} |"
            fits = cell_len(f"{caret} {note}") <= room
            yield ExcerptLine(text=f"{blank} {caret[:room]}", kind="caret", remark=note if fits else "")
            if note and not fits:
                yield ExcerptLine(text=blank, kind="caret", remark=note)


def _hidden(excerpt: SourceExcerpt, dent: int, room: int) -> int:
    """Return how many characters to cut at the left to show an expression far to the right; "…" replaces the next."""
    if excerpt.column is None or excerpt.end_column is None or excerpt.line != excerpt.end_line:
        return 0
    return max(0, min(excerpt.end_column - dent - room, excerpt.column - dent - 1))


def _carets(excerpt: SourceExcerpt, number: int, text: str, start: int, seen: str) -> str:
    """Return the carets below one line of the expression, in terminal columns; "" if its columns are unknown."""
    if excerpt.column is None or excerpt.end_column is None:
        return ""
    begin = excerpt.column if number == excerpt.line else len(text) - len(text.lstrip())
    end = excerpt.end_column if number == excerpt.end_line else len(text)
    if not start <= begin < end:
        return ""
    return " " * cell_len(seen[: begin - start]) + "^" * max(cell_len(text[begin:end]), 1)
