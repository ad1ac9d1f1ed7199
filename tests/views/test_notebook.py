"""How a notebook shows a case and its parts."""

from __future__ import annotations

from html.parser import HTMLParser

import factory
import factory_of_verbs
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nandoctor.views import notebook
from nandoctor.views.html import card_of
from nandoctor.views.notebook import show_records

FIXABLE = factory.fixable()
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


@pytest.fixture
def shell(monkeypatch):
    shell = InteractiveShell()
    monkeypatch.setattr(notebook, "_find_shell", lambda: shell)
    show_records()
    return shell


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


def test_records_with_a_document_are_cards(shell):
    records = (FIXABLE.fixes[0], factory_of_verbs.verification("fixed"))
    cards = [shell.display_formatter.format(record)[0]["text/html"] for record in records]
    assert "variance + 1e-5" in cards[0]
    assert all(Balanced(card).text for card in cards)


def test_nothing_happens_outside_of_ipython(monkeypatch):
    monkeypatch.setattr(notebook, "_find_shell", lambda: None)
    show_records()
