"""Names of 300 characters, null characters, surrogates and direction marks do no harm in any renderer."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from nandoctor.evidence.formats import FloatFormat
from nandoctor.renderers.inspect_dump import print_inspection
from nandoctor.renderers.jsonfile import dumps, read_report
from nandoctor.renderers.markdown import report_markdown
from nandoctor.renderers.notebook_card import report_html
from nandoctor.renderers.page import report_page
from nandoctor.renderers.save import ENDINGS, save_report
from nandoctor.renderers.terminal import one_line, print_report

sys.path.insert(0, str(Path(__file__).parents[1] / "renderers"))
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
    """What each renderer of text gives."""
    screen, inspection = io.StringIO(), io.StringIO()
    print_report(report, Console(file=screen, width=80))
    print_inspection(report.dump, Console(file=inspection, width=80))
    return {
        "screen": screen.getvalue(),
        "inspection": inspection.getvalue(),
        "line": one_line(report),
        "markdown": report_markdown(report),
        "page": report_page(report),
        "card": report_html(report),
        "json": dumps(report),
    }


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_does_no_harm_in_any_renderer(kind):
    report = renamed(factory.fixable(), NAMES[kind])
    texts = shown(report)
    for where, text in texts.items():
        text.encode("utf-8")
        assert re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u2028]", text) is None, where
        assert "<script>alert" not in text or where not in ("page", "card"), where
    assert max(map(len, texts["screen"].splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_a_name_does_no_harm_in_any_file(kind, tmp_path):
    report = renamed(factory.fixable(), NAMES[kind])
    for ending in ENDINGS:
        save_report(report, tmp_path / f"report{ending}")
        assert (tmp_path / f"report{ending}").stat().st_size > 0
    assert read_report(tmp_path / "report.json") == report
