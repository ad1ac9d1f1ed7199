"""Names of 300 characters, null characters, surrogates and direction marks do no harm in any view."""

import json
import re
import sys
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from wording import plain_text

from nandoctor.evidence.codec import to_json
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.triage import CodePlace, DumpResult, Group, Triage
from nandoctor.views.html import card_of
from nandoctor.views.inspect_dump import inspection_document
from nandoctor.views.markdown import draw_markdown
from nandoctor.views.report import report_document
from nandoctor.views.save import ENDINGS, save
from nandoctor.views.triage import triage_document, triage_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "views"))
import factory

NAMES = {
    "long": "x" * 300,
    "null": "a\0b",
    "escape": "\x1b[2J\x1b]0;title\x07",
    "surrogate": "\ud800.weight",
    "direction": "\u202eevil\u2066",
    "markup": "[red]</script><script>alert(1)</script>`|*_",
    "lines": "one\ntwo\r\u2028three",
}
MORE_NAMES = {
    **NAMES,
    "link": "\x1b]8;;http://x\x1b\\a\x1b]8;;\x1b\\ \x9d8;;x\x9c [link=http://x]b[/link]",
    "attribute": '" onmouseover="alert(1)" x=\'',
    "style": "</style></title><svg onload=alert(1)><!--",
    "workflow": "::error file=a::x\n##[error]y",
}
CONTROL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff\ud800-\udfff]"
)
FREE = {"name", "path", "module", "type_name", "text", "file", "headline", "title", "explanation", "parameter"}


def renamed(record, name):
    """The report with `name` put for every name, path and text in it."""
    if isinstance(record, tuple):
        return tuple(renamed(item, name) for item in record)
    if not is_dataclass(record) or isinstance(record, FloatFormat):
        return record
    changes = {}
    for field in fields(record):
        value = getattr(record, field.name)
        changes[field.name] = name if field.name in FREE and isinstance(value, str) and value else renamed(value, name)
    return replace(record, **changes)


def shown(report):
    """What each view of text gives."""
    return {
        "screen": plain_text(report_document(report), width=80),
        "inspection": plain_text(inspection_document(report.dump), width=80),
        "markdown": draw_markdown(report_document(report, "page")),
        "page": factory.sketch_of(report),
        "card": card_of(report_document(report)),
        "json": to_json(report),
    }


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_does_no_harm_in_any_view(kind):
    report = renamed(factory.fixable(), NAMES[kind])
    texts = shown(report)
    for where, text in texts.items():
        text.encode("utf-8")
        assert CONTROL.search(text.replace("\t", "")) is None, where
        assert "<script>alert" not in text or where not in ("page", "card"), where
    assert max(map(len, texts["screen"].splitlines())) <= 80


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes, and where its links go."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, [(name, value if name == "href" else "") for name, value in attrs]))


def elements(page):
    """The elements but `<code>`, which any pair of backticks in a sentence makes."""
    return [one for one in Elements(page).found if one[0] != "code"]


def triage_of(name):
    """A triage in which everything that a file, a model or a path may name is called so."""
    place = CodePlace(file=name, line=3, text=name, module=name, type=name, op=name)
    names = {"title": name, "headline": name, "place": place, "paths": (name,), "modules": (name,), "grade": "exact"}
    group = Group(
        **names,
        verdict="precision",
        cause="eps-underflow",
        steps=(3, 9),
        runs=(name,),
        representative=name,
        fix=name,
        fix_note=name,
        page="reports/0.html",
    )
    read = DumpResult(path=name, key="0", outcome="analysed", report="reports/0.json")
    unread = DumpResult(path=f"{name}.pth", key="1", outcome="unreadable", reason=f"{name}.pth: {name}")
    counts = {"num_reused": 0, "num_left": 0, "elapsed_s": 1.0}
    return Triage(dumps=(read, unread), groups=(group,), folder=name, **counts)


@pytest.mark.parametrize("kind", MORE_NAMES)
def test_a_name_does_no_harm_in_a_triage(kind):
    found = triage_of(MORE_NAMES[kind])
    screen = plain_text(triage_document(found), width=80)
    page, lines = factory.sketch_of(found), triage_lines(found)
    assert elements(page) == elements(factory.sketch_of(triage_of("x")))
    assert [json.loads(line)["kind"] for line in lines.splitlines()] == ["dump", "dump", "group", "triage"]
    for where, text in {"page": page.replace("\t", ""), "lines": lines, "screen": screen}.items():
        assert CONTROL.search(text) is None, where
    assert max(map(len, screen.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_a_name_does_no_harm_in_any_file(kind, tmp_path):
    report = renamed(factory.fixable(), NAMES[kind])
    for ending in ENDINGS:
        save(report, tmp_path / f"report{ending}")
        written = (tmp_path / f"report{ending}").read_bytes()
        assert written
        if ending not in (".png", ".pdf"):
            assert CONTROL.search(written.decode().replace("\t", "")) is None, ending
