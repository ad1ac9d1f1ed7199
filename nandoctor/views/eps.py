"""The document of `nandoctor eps`: numbers in each format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nandoctor.evidence.formats import RoundedConstant
from nandoctor.text import constant, number, percent
from nandoctor.views.blocks import Block, Column, Section, Table, Tone

_TONES: dict[str, Tone] = {"zero": "failed", "overflow": "failed", "subnormal": "unclear"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedValues:
    """Numbers in each format, those of one number together."""

    schema: str = "nandoctor.eps/2"
    values: Sequence[RoundedConstant]


def eps_document(answer: RoundedValues) -> Iterator[Block]:
    """Yield a table for each number."""
    for value in dict.fromkeys(rounded.value for rounded in answer.values):
        yield Section("", [_formats([rounded for rounded in answer.values if rounded.value == value])])


def _formats(rows: Sequence[RoundedConstant]) -> Table:
    """Return what each format makes of one number."""
    columns = (
        Column(constant(rows[0].value), [rounded.format.label for rounded in rows]),
        Column("becomes", [constant(rounded.rounded) for rounded in rows], spare=1),
        Column("which is", [describe_rounding(rounded) for rounded in rows]),
        Column("lost when added to |x| >=", [_absorbed_from(rounded) for rounded in rows], spare=2),
    )
    return Table(columns=columns, tones=[_TONES.get(row.effect, "") for row in rows])


def describe_rounding(rounded: RoundedConstant) -> str:
    """Return what is left of the number: "zero", "subnormal, 6.6 % off"."""
    if rounded.effect in ("zero", "overflow"):
        return {"zero": "zero", "overflow": "overflows"}[rounded.effect]
    if rounded.rel_err == 0:
        return "exact" if rounded.effect == "normal" else "subnormal, exact"
    off = f"{percent(rounded.rel_err)} off"
    return f"{'rounded' if rounded.effect == 'normal' else 'subnormal'}, {off}"


def _absorbed_from(rounded: RoundedConstant) -> str:
    if rounded.absorbed_from == 0:
        return "0 (always)"
    return "never" if math.isinf(rounded.absorbed_from) else number(rounded.absorbed_from)
