"""Records of what a report shows verbatim: lines of source, a sample of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The source around the expression to look at.

    `path` is the file's, relative to the working directory of the replay if it is inside. `function` is the qualified
    name of the enclosing function or class, "" at module level. `first` is the line number of the first of `lines`,
    in which tabs are expanded to spaces. The expression spans from `column` of `line` to `end_column` of `end_line`, in
    characters from 0; if these are unknown it is the whole `line`.
    """

    file: str
    path: str
    function: str
    first: int
    lines: tuple[str, ...]
    line: int
    end_line: int
    column: int | None
    end_column: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A sample of the array `name` as a small image.

    `pixels` are height x width grey levels, one byte each, row by row, in base64. `low` and `high` are the smallest and
    largest finite value before scaling to grey levels; `num_bad` values are non-finite.
    """

    kind: Literal["image"] = "image"
    name: str
    sample: int
    low: float | None
    high: float | None
    num_bad: int
    height: int
    width: int
    pixels: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A sample of the array `name` as curves along dimension `dim`, of `length` values each.

    Each curve, for the first of `num_channels`, is cut into pieces with their limits in `lows` and `highs`: None if
    the piece has a non-finite value.
    """

    kind: Literal["signal"] = "signal"
    name: str
    sample: int
    dim: int
    length: int
    num_channels: int
    lows: tuple[tuple[float | None, ...], ...]
    highs: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """A sample of the integer array `name`: the first of its `length` ids."""

    kind: Literal["ids"] = "ids"
    name: str
    sample: int
    length: int
    ids: tuple[int, ...]


SampleView = Picture | Signal | TokenIds
"""A sample of the batch; a report has it only on request."""
