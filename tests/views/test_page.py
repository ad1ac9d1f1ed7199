"""The page, and the card of a notebook, as text: well-formed, self-contained, escaped, small."""

import base64
import html
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import factory
import pytest

from nandoctor.views.html import card_of, page_of
from nandoctor.views.report import report_document

VOID = {"br", "meta", "link", "input", "img"}


class Balanced(HTMLParser):
    """Collects tags, attributes and text, and fails on a tag that is not closed by its own kind."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], set(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += [data.strip()] * bool(data.strip())


def card(report):
    return card_of(report_document(report))


@pytest.fixture(scope="module")
def page():
    return page_of(report_document(factory.fixable(), "page"))


@pytest.mark.parametrize("draw", [card, factory.sketch_of])
@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
def test_every_verdict_is_well_formed(make, draw):
    report = make()
    parsed = Balanced(draw(report))
    assert report.verdict in parsed.text
    assert report.headline in parsed.text
    assert ("script" in parsed.tags) == (draw is not card)


def test_the_story_comes_first_and_in_order(page):
    headings = re.findall(r'<h[23] id="([\w-]+)"', page)
    assert headings == [
        "h-fixes", "h-evidence", "h-what-else-was-tried", "h-every-layer", "h-plot", "h-ranges",
        "h-eps-constants", "h-in-the-file", "h-notes",
    ]  # fmt: skip
    assert page.index("<h1") < page.index("h-fixes")


def test_nothing_is_loaded_from_anywhere(page):
    outside = {
        value
        for _, name, value in Balanced(page).attributes
        if name in ("src", "href", "xlink:href", "action", "data", "srcset") and not value.startswith(("#", "data:"))
    }
    assert outside == set()
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\((?!#)", page)


def test_a_drawing_stands_on_the_page_with_its_finding(page):
    drawn = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)">', page)
    assert all(text.startswith(html.escape(factory.fixable().headline)) for _, text in drawn)
    for data, _ in drawn:
        assert ET.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert b">fp16 autocast</" in base64.b64decode(drawn[0][0])


def test_no_colour_of_a_card_is_fixed_against_the_page():
    """On a dark page black text would vanish: text takes the page's colour, but for marks that show on any ground."""
    html = card(factory.precision())
    assert "color: #fff" not in html
    assert "background: #" not in html
    assert "background: rgba(" in html
