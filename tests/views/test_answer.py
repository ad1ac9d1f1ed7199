"""The place of the answer and the lines of source around it."""

from dataclasses import replace

import factory
import pytest

from nandoctor.views.blocks import excerpt_lines
from nandoctor.views.report import answer_section, describe_verdict


def answer(report):
    return answer_section(report, "page").blocks[0]


def shown(excerpt, context=3, width=None):
    block = replace(answer(replace(factory.fixable(), excerpt=excerpt)), context=context)
    return [line.whole for line in excerpt_lines(block, width)]


@pytest.fixture
def excerpt():
    return factory.fixable().excerpt


def test_the_place_is_clickable(excerpt):
    block = answer(factory.fixable())
    assert (block.place, block.link) == ("net.py:45", "file:///home/them/net.py")
    assert block.where == "Attention.forward (encoder.blocks.2.attention, sample 2)"


@pytest.mark.parametrize("root", ["/home/them/.venv/lib/python3.11/site-packages/", "C:\\env\\site-packages\\"])
def test_a_file_of_a_package_is_named_from_the_package_on(root, excerpt):
    made = replace(factory.fixable(), excerpt=replace(excerpt, path=f"{root}kit/nn.py", file=f"{root}kit/nn.py"))
    assert answer(made).place == "kit/nn.py:45"


def test_an_expression_over_several_lines_has_carets_below_each(excerpt):
    lines = ("def forward(self, x):", "    return (x", "            + y", "            + 1e-8)", "", "")
    assert shown(replace(excerpt, first=9, lines=lines, line=10, end_line=12, column=11, end_column=18), context=1) == [
        "   9 | def forward(self, x):",
        "> 10 |     return (x",
        "     |            ^^",
        "> 11 |             + y",
        "     |             ^^^",
        "> 12 |             + 1e-8)",
        "     |             ^^^^^^ 1e-8 is 0 in fp16",
    ]


def test_a_narrow_screen_shows_the_expression_of_a_long_line(excerpt):
    line = "y = " + "a + " * 40 + "torch.sqrt(z)"
    end = len(line)
    text = shown(
        replace(excerpt, first=1, lines=(line,), line=1, end_line=1, column=end - 13, end_column=end), width=60
    )
    assert max(map(len, text)) <= 60
    assert "torch.sqrt(z)" in text[0]
    assert "^" * 13 in text[1]


def test_the_verdict_of_a_healthy_step_names_both_formats():
    told = describe_verdict(factory.healthy())
    assert told == "nothing that was checked failed under fp16 autocast or in fp32"
