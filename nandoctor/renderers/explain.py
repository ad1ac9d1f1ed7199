"""Render `nandoctor explain`: one cause in full, or the titles of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.text import Text

from nandoctor.causes.registry import Page
from nandoctor.renderers.console import labelled, literal, print_parts

_WIDTH = 88  # longer lines are hard to read


def print_catalogue(pages: Iterable[Page], console: Console) -> None:
    """Print every cause's code and title."""
    print_parts([labelled((page.code, page.title) for page in pages)], console)


def print_page(page: Page, console: Console) -> None:
    """Print the full page of one cause."""
    print_parts((Constrain(part, _WIDTH) for part in _parts(page)), console)


def _parts(page: Page) -> Iterator[RenderableType]:
    yield Text.assemble(literal(page.code, "bold"), ": ", literal(page.title))
    yield literal(page.summary[:1].upper() + page.summary[1:])
    for heading, paragraph in page.sections:
        yield Text()
        yield literal(heading, "bold")
        text = literal(paragraph)
        text.highlight_regex(r"`[^`]+`", "cyan")
        yield Padding(text, (0, 0, 0, 2))
    yield Text()
    yield literal(f"A program that fails this way, and its fix: docs/causes/{page.code}.md")
