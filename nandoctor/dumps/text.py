"""Text from a file that nobody vouches for, made fit for a terminal.

In: any string. Out: one short line without control characters.
"""

from __future__ import annotations

from collections.abc import Iterable

_MAX_LISTED = 12


def printable(text: str, limit: int = 120) -> str:
    """The text with everything a terminal might obey escaped, cut in the middle beyond `limit` characters."""
    if len(text) > limit:
        half = (limit - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def listing(names: Iterable[str]) -> str:
    """The names, printable, with commas between them; of many the first dozen, and how many more there are."""
    shown = [printable(name) for name in names]
    more = f" and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return ", ".join(shown[:_MAX_LISTED]) + more
