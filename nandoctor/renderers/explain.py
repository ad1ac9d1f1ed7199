"""What `nandoctor explain` prints: one cause in full, or all of them by their titles; and docs/causes.md.

In: pages of the catalogue. Out: text on a rich console, or Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from nandoctor.causes.registry import Page
from nandoctor.renderers.console import Encodable, labelled, literal

_WIDTH = 88  # a line that is longer is hard to read
_NOTHING = "None."
_PREFACE = "Made from the modules in `nandoctor/causes/`; `nandoctor explain CODE` prints a section of it."


def print_catalogue(pages: Iterable[Page], console: Console) -> None:
    """Print every code with its title."""
    console.print(Encodable(labelled((page.code, page.title) for page in pages)), highlight=False)


def print_page(page: Page, console: Console) -> None:
    """Print all that is known about one cause; a section that has nothing to say is left out."""
    for part in _parts(page):
        console.print(Encodable(part), highlight=False, width=min(console.width, _WIDTH))


def _parts(page: Page) -> Iterator[RenderableType]:
    yield Text.assemble(literal(page.code, "bold"), ": ", literal(page.title))
    yield literal(page.summary[:1].upper() + page.summary[1:])
    for heading, paragraph in page.sections:
        if paragraph != _NOTHING:
            yield Text()
            yield literal(heading, "bold")
            yield Padding(_prose(paragraph), (0, 0, 0, 2))


def _prose(paragraph: str) -> Text:
    """The paragraph, with the code in it told by its colour; the backticks stay for terminals without."""
    text = literal(paragraph)
    text.highlight_regex(r"`[^`]+`", "cyan")
    return text


def table_markdown(pages: Iterable[Page], document: str = "") -> str:
    """The causes as a Markdown table of codes and titles; the codes link to their sections in `document`."""
    rows = (f"| [`{page.code}`]({document}#{page.code}) | {page.title} |" for page in pages)
    return "\n".join(["| cause | what happens |", "|---|---|", *rows])


def catalogue_markdown(pages: Iterable[Page]) -> str:
    """All causes as one Markdown document: a table, then a section for each."""
    pages = list(pages)
    lines = ["# The causes", "", _PREFACE, "", table_markdown(pages)]
    for page in pages:
        lines += ["", f"## {page.code}", "", f"**{page.title}.** {page.summary[:1].upper()}{page.summary[1:]}"]
        for heading, paragraph in page.sections:
            if paragraph != _NOTHING:
                lines += ["", f"*{heading}.* {paragraph}"]
    return "\n".join(lines) + "\n"
