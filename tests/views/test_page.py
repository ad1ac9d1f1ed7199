"""The page as text: well-formed, self-contained, escaped, small."""

import base64
import html
import re
from xml.etree import ElementTree as ET

import factory
import pytest
from test_notebook import Balanced as Fragment

from nandoctor.views.html import page_of


class Page(Fragment):
    """A whole page; its void elements need no end, and those of a drawing may close themselves."""

    def __init__(self, text):
        self.attributes = []
        super().__init__(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag in ("meta", "link", "input", "img"):
            self.tags.add(tag)
        else:
            super().handle_starttag(tag, attrs)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]


@pytest.fixture(scope="module")
def page():
    return page_of(factory.fixable())


@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
def test_every_verdict_makes_a_well_formed_page(make):
    report = make()
    parsed = Page(factory.sketch_of(report))
    assert report.verdict in parsed.text
    assert report.headline in parsed.text


def test_the_story_comes_first_and_in_order(page):
    headings = re.findall(r'<h[23] id="([\w-]+)"', page)
    assert headings == [
        "h-fixes", "h-evidence", "h-origin", "h-what-else-was-tried", "h-every-layer", "h-plot", "h-ranges",
        "h-eps-constants", "h-in-the-file", "h-notes",
    ]  # fmt: skip
    assert page.index("<h1") < page.index("h-fixes")


def test_nothing_is_loaded_from_anywhere(page):
    outside = {
        value
        for _, name, value in Page(page).attributes
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
    assert b">fp16 autocast</" in base64.b64decode(drawn[1][0])
