"""Draw a document as Markdown, fit for an issue. Names from a dump or a model are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from nandoctor.text import printable, printable_code, split_code
from nandoctor.views.blocks import Block, Excerpt, Facts, Headline, Patch, Plot, Section, Table, Text, excerpt_lines

_MAX_ROWS = 20
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$])")
_LINKS = str.maketrans({"@": "&#64;", "#": "&#35;"})  # a backslash does not stop GitHub from mentioning people
_FENCE = re.compile(r"`{3,}")


def draw_markdown(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown, with a blank line between any two."""
    return "\n\n".join(part for block in blocks for part in _draw(block, 0)) + "\n"


def _draw(block: Block, depth: int) -> Iterator[str]:
    """Yield the parts of a block at a depth of sections."""
    match block:
        case Headline():
            yield f"### {_with_code(f'{block.word} {block.text}'.strip())}"
        case Section():
            yield from _draw_section(block, depth)
        case Excerpt():
            place = f"**{escape(block.place)}**" if block.place else ""
            if where := ", ".join(filter(None, (place, escape(block.where)))):
                yield where
            if lines := [line.whole for line in excerpt_lines(block)]:
                yield _fenced(lines, "text")
        case Facts():
            texts = [_command(fact.text) if fact.is_command else _with_code(fact.text) for fact in block.facts]
            rows = [(_with_code(fact.label), text) for fact, text in zip(block.facts, texts, strict=True)]
            if rows:
                yield _table([("", ""), *rows])
        case Patch():
            if block.lines:
                yield _fenced(list(map(printable_code, block.lines)), "diff" if block.is_diff else "python")
        case Table():
            yield from _draw_table(block)
        case Plot():
            yield escape(block.hint)
        case Text():
            yield _with_code(block.text)


def _draw_section(section: Section, depth: int) -> Iterator[str]:
    title = escape(section.title)
    if section.folded:
        yield f"<details><summary>{title}</summary>"
    elif title:
        yield f"**{title}**" if depth else f"#### {title}"
    for block in section.blocks:
        yield from _draw(block, depth + 1)
    if section.folded:
        yield "</details>"


def _draw_table(block: Table) -> Iterator[str]:
    shown = block.near_first(_MAX_ROWS)
    if block.title:
        yield escape(block.title)
    if block.columns:
        headings = [escape(column.heading.strip()) for column in block.columns]
        yield _table([headings, *([escape(text) for text, _ in row] for _, row in shown.rows())])
    if shown.legend:
        yield escape(shown.legend)


def _table(rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([first, f"|{'---|' * len(rows[0])}", *others])


def escape(text: str) -> str:
    """Return the text as is: without markup, mentions, or links to other issues."""
    return _SPECIAL.sub(r"\\\1", printable(text).translate(_LINKS))


def _with_code(text: str) -> str:
    """Return an escaped sentence with its code in backticks."""
    parts = split_code(printable(text))
    return "".join(_command(part) if is_code else escape(part) for part, is_code in parts)


def _command(text: str) -> str:
    """Return a command as code for a table cell, or as text if it has a backtick or a bar, which ends the cell."""
    return escape(text) if "`" in text or "|" in text else f"`{printable(text)}`"


def _fenced(lines: Sequence[str], language: str) -> str:
    """Return lines in a code fence that is longer than any run of backticks in them."""
    fence = "`" * max([3, *(len(run) + 1 for line in lines for run in _FENCE.findall(line))])
    return "\n".join([f"{fence}{language}", *lines, fence])
