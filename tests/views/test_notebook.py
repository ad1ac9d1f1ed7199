"""How a notebook shows a case and its parts."""

from html.parser import HTMLParser

import factory
import pytest

from nandoctor.views.html import card_of

VOID = {"br"}


class Balanced(HTMLParser):
    """Collects tags and text, and fails on a tag that is not closed by its own kind."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += [data.strip()] * bool(data.strip())


@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
def test_every_verdict_makes_one_well_formed_fragment(make):
    report = make()
    html = card_of(report)
    parsed = Balanced(html)
    assert html.startswith("<div")
    assert report.verdict in parsed.text
    assert report.headline in parsed.text
    assert "script" not in parsed.tags


def test_no_colour_is_fixed_against_the_page():
    """On a dark page black text would vanish: text takes the page's colour, but for marks that show on any ground."""
    html = card_of(factory.precision())
    assert "color: #fff" not in html
    assert "background: #" not in html
    assert "background: rgba(" in html
