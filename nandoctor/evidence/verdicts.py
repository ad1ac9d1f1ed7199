"""The verdicts on a dump: one word for what kind of failure it shows."""

from __future__ import annotations

from typing import Literal

Verdict = Literal[
    "precision",
    "numerics",
    "state",
    "input",
    "loss-scale",
    "silent",
    "healthy",
    "not-reproduced",
    "cannot-tell",
    "fixed",
    "interrupted",
]
NOTHING_FOUND: frozenset[Verdict] = frozenset({"healthy", "not-reproduced", "cannot-tell", "fixed"})
"""Nothing non-finite was seen: in all there is; though the dump holds some; in what could be looked at; though the dump
holds some, and its code has changed since."""
