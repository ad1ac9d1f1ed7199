"""The source files of a training by their hashes, so that a later replay can tell what has changed since.

In: source files. Out: `SourceHash` records, and the lines that differ between one and a file as it is now.

The hashes of single lines are short: they tell where a file changed, and nobody can read the code in them.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

_LINE_NBYTES = 4
_LINE_DIGITS = 2 * _LINE_NBYTES
_MAX_NBYTES = 1 << 20
_MAX_LINES = 5_000  # between the first and the last that differ


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHash:
    """The sha256 of a file, and eight hexadecimal digits for each of its lines; "" where those are not known."""

    sha256: str
    lines: str = ""


def hash_source(path: Path, *, lines: bool = True) -> SourceHash | None:
    """The hashes of a file; None where it cannot be read, or is too large to be code that somebody wrote."""
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_NBYTES else None
    except OSError:
        return None
    if data is None:
        return None
    return SourceHash(sha256=hashlib.sha256(data).hexdigest(), lines="".join(_hash_lines(data)) if lines else "")


def changed_lines(was: SourceHash, path: Path) -> tuple[int, int] | None:
    """The first line of the file that is not as it was, from 1, and how many differ; None where that is not known."""
    now = hash_source(path)
    if now is None or not was.lines:
        return None
    before = [was.lines[place : place + _LINE_DIGITS] for place in range(0, len(was.lines), _LINE_DIGITS)]
    return count_changes(before, [now.lines[p : p + _LINE_DIGITS] for p in range(0, len(now.lines), _LINE_DIGITS)])


def count_changes(before: Sequence[str], after: Sequence[str]) -> tuple[int, int] | None:
    """The first line of `after` that differs, from 1, and how many lines do; None for none, or too many to compare.

    Lines that were taken out count as changes of the place where they stood.
    """
    same = _num_equal(zip(before, after, strict=False))
    before, after = before[same:], after[same:]
    tail = _num_equal(zip(reversed(before), reversed(after), strict=False))
    before, after = before[: len(before) - tail], after[: len(after) - tail]
    if max(len(before), len(after)) > _MAX_LINES:
        return None
    codes = difflib.SequenceMatcher(a=before, b=after).get_opcodes()
    edits = [(b1, max(a2 - a1, b2 - b1)) for tag, a1, a2, b1, b2 in codes if tag != "equal"]
    return (same + edits[0][0] + 1, sum(count for _, count in edits)) if edits else None


def _num_equal(pairs: Iterable[tuple[str, str]]) -> int:
    """How many of the first pairs are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _hash_lines(data: bytes) -> list[str]:
    return [hashlib.blake2b(line, digest_size=_LINE_NBYTES).hexdigest() for line in data.splitlines()]
