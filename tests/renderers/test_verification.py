"""What a verification says of the place."""

from __future__ import annotations

from dataclasses import replace

import factory

from nandoctor.evidence.trace import SourceLine
from nandoctor.evidence.verification import cannot_tell
from nandoctor.renderers.verification import short_story


def test_a_line_without_a_text_is_named_by_its_number():
    report = factory.precision()
    story = {}
    for text in ("y = x / 0", ""):
        made = factory.origin(report, source=SourceLine(file="model.py", line=7, text=text))
        story[text] = short_story(replace(cannot_tell("nan.pth", "none"), origin=made))
    assert "model.py:7: y = x / 0, in " in story["y = x / 0"]
    assert "model.py:7, in " in story[""]
