"""Numbers and names as people read them.

In: values of a report, and strings that come from a dump or a model and cannot be trusted. Out: short printable text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_KINDS = {"nan": "NaN", "+inf": "+Inf", "-inf": "-Inf"}


def printable(text: str) -> str:
    r"""The text on one line, with every character that is not plainly visible written out as an escape.

    A module or array may carry any name: a terminal escape (`\x1b`) would run on the reader's terminal, a newline
    would break the layout, a direction override would show another name.
    """
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def shorten(text: str, width: int) -> str:
    """The text cut in its middle to at most `width` characters, most of them from its end, where siblings differ."""
    if len(text) <= width:
        return text
    kept = max(width - 1, 0)
    tail = kept - kept // 3
    return f"{text[: kept - tail]}…{text[len(text) - tail :]}"


def number(value: float) -> str:
    """Whole up to six digits (65504), three significant digits for the rest (0.0312, 8.12e+06, 5.96e-08)."""
    if 1000 <= abs(value) < 999_999.5:
        return f"{value:.0f}"
    return f"{value:.3g}"


def written(value: float) -> str:
    """A constant as it stands in code: 1e-8, 0.01, with no zeros in front of the exponent."""
    mantissa, has_exponent, exponent = f"{value:.6g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if has_exponent else mantissa


def times(ratio: float) -> str:
    """A ratio above one with as many digits as keep it above one: 1.24, 1.0002, 8.1e+05."""
    return f"{ratio:.4f}" if ratio < 1.005 else f"{ratio:.3g}"


def shape_text(shape: Iterable[int]) -> str:
    """A shape as torch prints it: [4, 16, 32, 32]."""
    return f"[{', '.join(str(size) for size in shape)}]"


def kinds_text(kinds: Iterable[str]) -> str:
    """Which non-finite values: "NaN and +Inf"."""
    return join_words([_KINDS.get(kind, printable(kind)) for kind in kinds]) or "non-finite values"


def join_words(words: Sequence[str]) -> str:
    """A list as prose: "a", "a and b", "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def join_first(words: Sequence[str], limit: int) -> str:
    """As `join_words`, with the words past `limit` only counted: "a, b and 9 more"."""
    left = len(words) - limit
    return join_words([*words[:limit], f"{left} more"] if left > 0 else words)


def ordinal(place: int) -> str:
    """A place counted from 1: 1st, 2nd, 3rd, 11th, 22nd."""
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"


def call_label(name: str, call: int, type_name: str = "") -> str:
    """A module call as people read it, `call` counted from 0: "norm (2nd call)", "norm (LayerNorm, 2nd call)"."""
    notes = [*([type_name] if type_name else []), *([f"{ordinal(call + 1)} call"] if call else [])]
    return f"{name} ({', '.join(notes)})" if notes else name


def byte_size(nbytes: int) -> str:
    """A file's size in decimal units: 812 bytes, 1.25 MB."""
    if nbytes < 1000:
        return f"{nbytes} bytes"
    size, unit = nbytes / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"
