"""What each surface makes of a document, as text to compare."""

import html
import io
import re

from factory import document, sketch_of
from rich.console import Console

from nandoctor.views.blocks import Excerpt, Facts, Headline, Patch, Plot, Section, Table, Text, excerpt_lines
from nandoctor.views.html import card_of
from nandoctor.views.markdown import draw_markdown
from nandoctor.views.terminal import print_document


def terminal(thing, *, width=80, level="screen", more=None, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    print_document(document(thing, level, **(more or {})), console)
    return console.file.getvalue()


def markdown(thing, **more):
    return draw_markdown(document(thing, "page", **more))


def visible(markup):
    body = re.sub(r"<(style|script|title|noscript)\b.*?</\1>", "", markup, flags=re.DOTALL)
    return "\n".join(line for line in html.unescape(re.sub(r"<[^>]+>", "", body)).splitlines() if line.strip())


SURFACES = {
    "terminal": terminal,
    "markdown": markdown,
    "page": lambda thing: visible(sketch_of(thing)),
    "card": lambda thing: visible(card_of(document(thing))),
}
LEVELS = {"terminal": "screen", "markdown": "page", "page": "page", "card": "screen"}


def texts(blocks, limit):
    """Every text that blocks have to say, with `limit` rows of a table."""
    for block in blocks:
        match block:
            case Headline():
                yield from (block.word, block.text)
            case Section():
                yield block.title
                yield from texts(block.blocks, limit)
            case Excerpt():
                yield from (block.place, block.where, *(line.whole for line in excerpt_lines(block)))
            case Facts():
                yield from (text for fact in block.facts for text in (fact.label, fact.text))
            case Patch():
                yield from block.lines
            case Table():
                shown = block.near_first(limit)
                yield from (shown.title, shown.legend, *(column.heading for column in shown.columns))
                yield from (cell for column in shown.columns for cell in column.cells)
            case Plot() | Text():
                yield getattr(block, "text", "")


def letters(text):
    """The letters and digits alone: neither markup nor where a line breaks matters."""
    return re.sub(r"[\W_]+", "", text.replace("&#64;", "@").replace("&#35;", "#"))
