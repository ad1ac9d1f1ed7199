"""The document of `nandoctor explain`: one cause in full, or the titles of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nandoctor.causes.registry import Page
from nandoctor.views.blocks import Block, Fact, Facts, Headline, Section, Text


def catalogue_document(pages: Sequence[Page]) -> Iterator[Block]:
    """Yield every cause's code and title."""
    yield Facts([Fact(page.code, page.title) for page in pages])


def cause_document(page: Page) -> Iterator[Block]:
    """Yield the full page of one cause."""
    yield Headline(page.title, word=f"{page.code}:")
    yield Text(page.summary[:1].upper() + page.summary[1:])
    for heading, paragraph in page.sections:
        yield Section(heading, [Text(paragraph)])
    yield Text(f"The rule itself is the module nandoctor.causes.{page.code.replace('-', '_')}")
