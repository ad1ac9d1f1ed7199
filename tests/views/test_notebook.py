"""How a notebook shows a case and its parts."""

from __future__ import annotations

from html.parser import HTMLParser

import factory
import factory_of_verbs
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nandoctor.views import notebook
from nandoctor.views.evidence import describe_tensor
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


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        (factory.tensor(2.0, shape=(3,)), "fp16 [3], -1 to 2, median magnitude 0.167"),
        (
            factory.tensor(None, nonfinite=factory.counts(5), shape=(4, 2)),
            "fp16 [4, 2], no finite value, NaN in 5 of 8",
        ),
        (
            factory.tensor(1.0, nonfinite=factory.counts(8, samples=(0, 1)), shape=(2, 4)),
            "fp16 [2, 4], -0.5 to 1, median magnitude 0.0833, NaN in 8 of 8",
        ),
    ],
)
def test_a_tensor_in_one_line(stats, text):
    assert describe_tensor(stats) == text
