"""The verdicts on a dump: one word for the kind of failure."""

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
]
NOTHING_FOUND: frozenset[Verdict] = frozenset({"healthy", "not-reproduced", "cannot-tell", "fixed"})
"""The replay saw nothing non-finite: "healthy" although all was checked, "not-reproduced" although the dump has some,
"cannot-tell" as far as could be checked, "fixed" although the dump has some, because the code has changed since."""
