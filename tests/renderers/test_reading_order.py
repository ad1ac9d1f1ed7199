"""What a reader meets first on every surface: the cause, its line, the fix; and no word of this project alone."""

from __future__ import annotations

import html
import io
import re
from dataclasses import replace

import factory
import pytest
from private_words import find_words
from rich.console import Console

from nandoctor.renderers.markdown import report_markdown
from nandoctor.renderers.notebook_card import report_html
from nandoctor.renderers.terminal import print_report

TERMINAL, OTHERS = 25, 32  # lines of a first screen


def terminal(report):
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_report(report, console)
    return console.file.getvalue()


def visible(markup):
    """The text of a page, without its styles and scripts, tags as line breaks."""
    body = re.sub(r"<(style|script|title|noscript)\b.*?</\1>", "", markup, flags=re.DOTALL)
    return "\n".join(line for line in html.unescape(re.sub(r"<[^>]+>", "", body)).splitlines() if line.strip())


SURFACES = {
    "terminal": terminal,
    "markdown": report_markdown,
    "page": lambda report: visible(factory.sketch_of(report)),
    "notebook": lambda report: visible(report_html(report)),
}
each_surface = pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)


@each_surface
def test_cause_line_and_fix_come_first_in_this_order(surface):
    report = factory.fixable()
    first = "\n".join(surface(report).splitlines()[: TERMINAL if surface is terminal else OTHERS])
    parts = (
        report.headline,
        "net.py:45",
        "^^^^^^^^^^^^^^^ 1e-8 is 0 in fp16",
        "fp32 is finite",
        "reproduces your run",
        "+ return x / torch.sqrt(variance + 1e-5)",
        "nandoctor fix NaN.pth --model net.py:Net --write",
        "gradients finite",
    )
    places = [first.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("surface", [report_markdown, SURFACES["page"], SURFACES["notebook"]])
def test_evidence_comes_after_the_fix_and_the_extent_last(surface):
    text = " ".join(surface(factory.fixable()).split())
    places = [text.index(part) for part in ("1e-5", "eps-underflow: ", "first non-finite of", "NaN in 8,192 of 65,536")]
    assert places == sorted(places)


def test_the_terminal_leaves_to_the_page_what_a_fix_tells():
    text = terminal(factory.fixable())
    places = [text.index(part) for part in ("+ return x / torch.sqrt(variance + 1e-5)", "keep in fp32", "explain eps-")]
    assert places == sorted(places)
    for label in ("cause", "layers", "extent", "input", "path", "Largest magnitudes"):
        assert f"\n  {label}  " not in text


def test_the_terminal_names_the_layer_once():
    made = factory.precision()
    assert "first non-finite of" not in terminal(made)  # the table marks it
    inside = replace(
        made, first_nonfinite=replace(made.first_nonfinite, where="between", seen_in=made.runs.fp32.modules[7].place)
    )
    assert "first seen inside the forward" in terminal(inside)
    elsewhere = factory.fixable()
    elsewhere = replace(elsewhere, origin=factory.put(elsewhere.origin, module="decoder"))
    assert "is the first non-finite" in " ".join(terminal(elsewhere).split())


@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
@each_surface
def test_no_word_of_ours_stands_among_the_first_lines(surface, make):
    first = "\n".join(surface(make()).splitlines()[:20])
    assert find_words(first) == []
    assert make().headline in " ".join(first.replace("\\", "").split())
