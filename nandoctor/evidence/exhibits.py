"""What a report shows as it is: lines of source, a sample of the batch."""

from __future__ import annotations

from dataclasses import dataclass


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
    """A sample of the saved array `name` as a small image, kept only where it was asked for.

    `pixels` are height x width grey levels, one byte each, row by row, in base64.
    """

    name: str
    sample: int
    height: int
    width: int
    pixels: str
