"""The meaning of each verdict, and how good the news is."""

from __future__ import annotations

from collections.abc import Mapping

from nandoctor.evidence.verdicts import Verdict
from nandoctor.views.blocks import Tone

MEANINGS: Mapping[Verdict, str] = {
    "precision": "{kinds} {under} only; fp32 is finite",
    "numerics": "{kinds} in fp32 as well: half precision is not to blame",
    "state": "the weights or buffers in the file are to blame",
    "input": "the batch in the file is non-finite before any layer reads it",
    "loss-scale": "every gradient is finite at loss scale 1; a GradScaler skips such a step",
    "silent": "finite {under}, and far from what fp32 computes",
    "healthy": "nothing that was checked failed {under} or in fp32",
    "not-reproduced": "the saved failure was not reproduced",
    "cannot-tell": "no certain failure in what could be checked",
    "fixed": "the step failed, and passes with the current code",
}
"""A verdict as people read it, with fields for what is non-finite, `kinds`, and in which run, `under`."""


def tone_of(verdict: Verdict) -> Tone:
    """Return how good the news is."""
    if verdict in ("healthy", "fixed"):
        return "good"
    return "unclear" if verdict in ("loss-scale", "not-reproduced", "cannot-tell") else "failed"
