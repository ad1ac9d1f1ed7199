"""The page as text: well-formed, self-contained, escaped, small."""

from __future__ import annotations

import base64
import html
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import factory
import pytest
from test_notebook import Balanced as Fragment

from nandoctor.views.html import page_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&{{ 7 * 7 }}{% x %}]]>\x1b\n\ud800\u202e"


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
        "h-fixes", "h-evidence", "h-origin", "h-what-else-was-tried", "h-every-layer", "h-plots", "h-ranges",
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


def test_no_id_stands_twice(page):
    ids = [value for _, name, value in Page(page).attributes if name == "id"]
    assert sorted(set(ids)) == sorted(ids)
    referred = {
        value[1:] for _, name, value in Page(page).attributes if name.endswith("href") and value.startswith("#")
    }
    assert referred <= set(ids)


def hostile():
    made = factory.fixable()
    rows = tuple(factory.put(row, module=HOSTILE, type=HOSTILE) for row in made.runs.autocast.modules[:12])
    fp32 = tuple(factory.put(row, module=f"{HOSTILE}.{HOSTILE}") for row in made.runs.fp32.modules)
    runs = replace(
        made.runs,
        autocast=replace(made.runs.autocast, modules=rows, raised=HOSTILE),
        fp32=replace(made.runs.fp32, modules=fp32),
        first_unholdable=factory.Place(module=HOSTILE, type=HOSTILE, call=0),
    )
    source = replace(made.origin.source, file=HOSTILE, text=HOSTILE)
    named = replace(made.origin.inputs[0], path=HOSTILE)
    return replace(
        made,
        headline=HOSTILE,
        runs=runs,
        dump=factory.dump(path=HOSTILE, bad_weights=(factory.array(HOSTILE, 1),)),
        first_nonfinite=factory.put(made.first_nonfinite, module=HOSTILE, type=HOSTILE),
        origin=factory.put(made.origin, module=HOSTILE, op=HOSTILE, source=source, inputs=(named,)),
        cause=replace(made.cause, title=HOSTILE, explanation=HOSTILE, evidence=()),
        chain=tuple(factory.put(link, module=HOSTILE, op=HOSTILE, text=HOSTILE) for link in made.chain),
        fixes=tuple(replace(one, title=HOSTILE, patch=HOSTILE) for one in made.fixes),
        eps_audit=tuple(replace(one, module=HOSTILE, name=HOSTILE) for one in made.eps_audit),
        environment=replace(made.environment, platform=HOSTILE, device=HOSTILE),
        notes=(HOSTILE,),
        next_steps=(HOSTILE,),
    )


def test_hostile_names_are_text():
    text = page_of(hostile())
    parsed = Page(text)
    assert text.count("<script>") == 1
    assert all(value.startswith("data:") for tag, name, value in parsed.attributes if (tag, name) == ("img", "src"))
    assert not any(name.startswith("on") for _, name, _ in parsed.attributes)
    assert not set("\x1b\u202e\ud800") & set(text)
    assert "{{ 7 * 7 }}" in text
    text.encode()


def test_a_drawing_stands_on_the_page_with_its_finding(page):
    drawn = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)">', page)
    assert all(text.startswith(html.escape(factory.fixable().headline)) for _, text in drawn)
    for data, _ in drawn:
        assert ET.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert b">fp16 autocast</" in base64.b64decode(drawn[1][0])
