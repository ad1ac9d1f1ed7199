"""Compare printed texts across machines, without the numbers that depend on the processor's order of summation."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?(e[+-]?\d+)?")
BAR = re.compile(r"[█░]+")
AGREEMENT = re.compile(
    r"(?<=non-finite, )all others (identical|within # % of the largest saved value)"
    r"|(?<=finite in both, )(and identical|within # % of the largest saved value)"
)
"""A replay that is bit-identical on one machine may agree only within rounding on another, and vice versa."""


def words(text: str) -> list[str]:
    """Return the words of `text` with # for each number, without a table's bars, and one word for both agreements."""
    plainer = " ".join(NUMBER.sub("#", BAR.sub("", text)).split())
    return AGREEMENT.sub("AGREES", plainer).split()
