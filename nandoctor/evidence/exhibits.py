"""What a report shows as it is: lines of source, a sample of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The source around the expression to look at.

    `path` is the file's, relative to the working directory of the replay where it lies in that. `function` is the
    qualified name of what it stands in, "" at the top of a module. `first` is the number of the first of `lines`, whose
    tabs are spaces. The expression goes from `column` of `line` to `end_column` of `end_line`, columns in characters
    from 0; where they are not known it is the whole of `line`.
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

    `pixels` are height x width grey levels, one byte each, row by row, in base64. `low` and `high` are the limits of
    its finite values before they were stretched to grey levels; `num_bad` values are non-finite.
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
    """A sample of the array `name` as curves along dimension `dim`, `length` places long.

    Each curve, for the first of `num_channels`, is cut into pieces with their limits in `lows` and `highs`: None where
    a value is non-finite.
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
    """A sample of the array `name`, whose values are whole numbers: the first of `length` ids."""

    kind: Literal["ids"] = "ids"
    name: str
    sample: int
    length: int
    ids: tuple[int, ...]


SampleView = Picture | Signal | TokenIds
"""A sample of the batch, which is in a report only where it was asked for."""
