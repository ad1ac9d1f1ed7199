"""The meaning of each verdict, and the tone in which every surface shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nandoctor.evidence.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Tone:
    """How good the news is.

    `name` is a CSS class of the page, `text` a rich style, `badge` one for a word on a coloured background. `color` is
    a CSS colour that serves as the background of white text in light and in dark notebooks.
    """

    name: str
    badge: str
    text: str
    color: str


GOOD = Tone(name="good", badge="black on green", text="green", color="#00735a")
UNCLEAR = Tone(name="unclear", badge="black on yellow", text="yellow", color="#8a6500")
FAILED = Tone(name="failed", badge="white on red", text="red", color="#b04a00")


@dataclass(frozen=True, slots=True)
class ShownVerdict:
    """A verdict as people read it; `meaning` has fields for what is non-finite, `kinds`, and in which run, `under`."""

    meaning: str
    tone: Tone


VERDICTS: Mapping[Verdict, ShownVerdict] = {
    "precision": ShownVerdict("{kinds} {under} only; fp32 is finite", FAILED),
    "numerics": ShownVerdict("{kinds} in fp32 as well: half precision is not to blame", FAILED),
    "state": ShownVerdict("the weights or buffers in the file are to blame", FAILED),
    "input": ShownVerdict("the batch in the file is non-finite before any layer reads it", FAILED),
    "loss-scale": ShownVerdict("every gradient is finite at loss scale 1; a GradScaler skips such a step", UNCLEAR),
    "silent": ShownVerdict("finite {under}, and far from what fp32 computes", FAILED),
    "healthy": ShownVerdict("nothing that was checked failed {under} or in fp32", GOOD),
    "not-reproduced": ShownVerdict("the saved failure was not reproduced", UNCLEAR),
    "cannot-tell": ShownVerdict("no certain failure in what could be checked", UNCLEAR),
    "fixed": ShownVerdict("the step failed, and passes with the current code", GOOD),
    "interrupted": ShownVerdict("the diagnosis was stopped before it was complete", UNCLEAR),
}
