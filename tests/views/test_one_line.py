"""One line for editors, one for GitHub."""

from __future__ import annotations

from dataclasses import replace

import factory

from nandoctor.views.one_line import github_line, one_line


def test_the_line_stands_before_the_code_and_the_message():
    assert one_line(factory.fixable()) == (
        "net.py:45: eps-underflow: 1e-8 rounds to 0 in fp16, so MultiheadAttention divides 0 by 0"
    )
    assert one_line(factory.healthy()).startswith("NaN.pth: healthy: The output is finite")


def test_github_marks_the_line():
    assert github_line(factory.fixable()).startswith(
        "::error file=net.py,line=45,endLine=45,title=eps-underflow::1e-8 "
    )
    assert github_line(factory.healthy()).startswith("::notice title=healthy::")


def test_no_name_can_begin_another_command():
    made = factory.fixable()
    hostile = replace(made, headline="a\n::error::b%", excerpt=replace(made.excerpt, path="x,line=1:\n::y"))
    assert len(github_line(hostile).splitlines()) == 1
    assert "file=x%2Cline=1%3A\\n%3A%3Ay,line=45" in github_line(hostile)
    assert github_line(hostile).endswith("b%25")
    assert len(one_line(hostile).splitlines()) == 1
