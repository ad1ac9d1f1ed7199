"""What each verdict means, and the tone in which every surface shows it.

In: nothing. Out: one table, from a verdict to a sentence and a tone; a tone has a colour for each surface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nandoctor.evidence.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Tone:
    """How good news is. `name` is a class of the page's styles, `badge` a style of rich, `color` a CSS colour.

    The colour is read as the ground of white text, on light and on dark notebooks.
    """

    name: str
    badge: str
    color: str


GOOD = Tone(name="good", badge="black on green", color="#00735a")
UNCLEAR = Tone(name="unclear", badge="black on yellow", color="#8a6500")
FAILED = Tone(name="failed", badge="white on red", color="#b04a00")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVerdict:
    """A verdict as people read it."""

    meaning: str
    tone: Tone


VERDICTS: Mapping[Verdict, ShownVerdict] = {
    "precision": ShownVerdict(meaning="non-finite under autocast only, fp32 stays finite", tone=FAILED),
    "numerics": ShownVerdict(meaning="non-finite in fp32 as well: not a matter of precision", tone=FAILED),
    "state": ShownVerdict(meaning="the saved weights or buffers are non-finite", tone=FAILED),
    "input": ShownVerdict(meaning="the saved batch is non-finite before any layer sees it", tone=FAILED),
    "loss-scale": ShownVerdict(
        meaning="the loss scale alone was too large; a GradScaler skips such a step", tone=UNCLEAR
    ),
    "silent": ShownVerdict(meaning="a value overflowed, and the output is finite but wrong", tone=FAILED),
    "healthy": ShownVerdict(meaning="nothing is non-finite", tone=GOOD),
    "not-reproduced": ShownVerdict(meaning="the saved failure did not come back", tone=UNCLEAR),
    "cannot-tell": ShownVerdict(meaning="nothing non-finite in what could be looked at", tone=UNCLEAR),
}
