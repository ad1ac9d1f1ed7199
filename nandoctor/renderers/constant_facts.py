"""The small constants of a report in sentences: where they stand, and what the format made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nandoctor.evidence.report import EpsUse
from nandoctor.renderers.facts import short_name
from nandoctor.text import constant, file_line, percent, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """A line of a table: its cells, and whether it tells of a failure."""

    cells: tuple[str, ...]
    failed: bool


CONSTANT_HEADINGS = ("constant", "in", "line", "used by", "becomes")


def list_small_constants(uses: Iterable[EpsUse]) -> list[TableLine]:
    """A table of small constants: value, where it stands, its line, the op that used it, and what is left of it."""
    return [
        TableLine(
            cells=(
                constant(use.value),
                _describe_owner(use),
                _describe_line(use),
                printable(use.op or ""),
                _describe_effect(use),
            ),
            failed=use.effect == "zero",
        )
        for use in uses
    ]


def describe_use(use: EpsUse) -> str:
    """Where a small constant stands, and what is left of it: "norm (net.py:45), used by add, is zero in fp16"."""
    line = f" ({_describe_line(use)})" if use.source else ""
    used = f", used by {printable(use.op)}," if use.op else ""
    return f"{_describe_owner(use)}{line}{used} {_describe_effect(use)}"


def _describe_effect(use: EpsUse) -> str:
    """What the format that it was used in makes of a small constant."""
    if use.dtype is None:
        return "was not seen in use"
    absorbed = ""
    if use.absorbed_share:
        absorbed = f", and lost in {percent(use.absorbed_share)} of what it is added to"
    elif use.bound_share:
        absorbed = f", and {percent(use.bound_share)} of the values are clamped to it"
    if use.effect == "zero":
        return f"is zero in {use.dtype}{absorbed}"
    if use.effect == "subnormal":
        wrong = f" and {percent(use.rel_err)} off" if use.rel_err is not None else ""
        return f"is subnormal in {use.dtype}{wrong}{absorbed}"
    return f"is kept in {use.dtype}{absorbed}"


def _describe_owner(use: EpsUse) -> str:
    if use.place == "optimizer":
        return "the optimizer"
    owner = short_name(use.module or "the model")
    more = f" and {use.num_uses - 1} more" if use.num_uses > 1 else ""
    return f"{owner}.{short_name(use.name)}{more}" if use.place == "module" else f"{owner}{more}"


def _describe_line(use: EpsUse) -> str:
    return file_line(use.source.file, use.source.line) if use.source else ""
