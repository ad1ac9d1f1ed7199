"""Lay out the lines of source of an `Excerpt`: numbered, cut to a width, with carets below the expression."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len, set_cell_size

from nandoctor.text import printable
from nandoctor.views.blocks import Excerpt

if TYPE_CHECKING:
    from nandoctor.evidence.report import SourceExcerpt


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
