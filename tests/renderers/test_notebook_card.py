from dataclasses import replace
from html.parser import HTMLParser

import factory
import pytest

from nandoctor.renderers.notebook_card import report_html

HOSTILE = "<script>alert(1)</script>'\"&{{ 7 * 7 }}\x1b\n\ud800"
VOID = {"br"}
FOLDED = {"details", "summary", "pre", "span"}


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
    html = report_html(report)
    parsed = Balanced(html)
    assert html.startswith("<div")
    assert report.verdict in parsed.text
    assert report.headline in parsed.text
    assert parsed.tags <= {"div", "p", "b", "br", "table", "tr", "th", "td", "code", "ul", "li", *FOLDED}


def test_the_first_layer_and_its_neighbours_are_there():
    text = Balanced(report_html(factory.precision())).text
    assert "computes 81,234 here: 24 % above what fp16 can hold (65,504)" in text
    row = text.index("encoder.blocks.2.attention")
    assert text[row - 1 : row + 6] == [
        ">",
        "encoder.blocks.2.attention",
        "MultiheadAttention",
        "NaN",
        "22.6",
        "-",
        "11.5",
    ]


def test_nothing_was_run():
    assert "headroom" not in report_html(factory.weights_only())


def test_hostile_names_are_text():
    made = factory.precision()
    runs = made.runs
    rows = tuple(factory.put(row, module=HOSTILE, type=HOSTILE) for row in runs.autocast.modules[5:10])
    html = report_html(
        replace(
            made,
            headline=HOSTILE,
            first_nonfinite=factory.put(made.first_nonfinite, module=HOSTILE, type=HOSTILE),
            runs=replace(runs, autocast=replace(runs.autocast, modules=rows)),
            next_steps=(HOSTILE,),
        )
    )
    parsed = Balanced(html)
    assert "script" not in parsed.tags
    assert r"""<script>alert(1)</script>'"&{{ 7 * 7 }}\x1b\n\ud800""" in parsed.text
    assert "\x1b" not in html
    html.encode()


def test_no_colour_is_fixed_against_the_page():
    """On a dark page black text would vanish: text takes the page's colour wherever it has no ground of its own."""
    html = report_html(factory.precision())
    assert html.count("color: #fff") == 1
    assert "background: #" in html.split("color: #fff")[0]
    assert "background: rgba(" in html
