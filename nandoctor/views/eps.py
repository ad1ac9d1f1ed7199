"""The document of `nandoctor eps`: numbers in each format, and the small constants of a replay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nandoctor.diagnosis.eps_audit import describe_rounding
from nandoctor.evidence.formats import RoundedConstant
from nandoctor.evidence.report import EpsUse
from nandoctor.text import constant, number
from nandoctor.views.blocks import Block, Column, Facts, Section, Table, Text, Tone
from nandoctor.views.jsonfile import dumps
from nandoctor.views.trials import constant_facts

SCHEMA = "nandoctor.eps/1"
_TONES: dict[str, Tone] = {"zero": "failed", "overflow": "failed", "subnormal": "unclear"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsAnswer:
    """What the verb was asked: numbers in each format, and the constants of a replay; None without one."""

    values: Sequence[RoundedConstant]
    uses: Sequence[EpsUse] | None


def dumps_eps(answer: EpsAnswer) -> str:
    """Return both lists as JSON text."""
    return dumps({"schema": SCHEMA, "values": answer.values, "uses": answer.uses or ()})


def eps_document(answer: EpsAnswer) -> Iterator[Block]:
    """Yield a table for each number, then the constants of the replay."""
    for value in dict.fromkeys(rounded.value for rounded in answer.values):
        yield Section("", [_formats([rounded for rounded in answer.values if rounded.value == value])])
    if answer.uses is not None:
        yield Section("", [_seen(answer.uses)])


def _formats(rows: Sequence[RoundedConstant]) -> Table:
    """Return what each format makes of one number."""
    columns = (
        Column(constant(rows[0].value), [rounded.format.label for rounded in rows]),
        Column("becomes", [constant(rounded.rounded) for rounded in rows], spare=1),
        Column("which is", [describe_rounding(rounded) for rounded in rows]),
        Column("lost when added to |x| >=", [_absorbed_from(rounded) for rounded in rows], spare=2),
    )
    return Table(columns=columns, tones=[_TONES.get(row.effect, "") for row in rows])


def _seen(uses: Sequence[EpsUse]) -> Block:
    """Return where each constant of a replay is, and what its format made of it."""
    if not uses:
        return Text("The replay found no eps in a module, an op or the optimizer.")
    return Facts(constant_facts(uses))


def _absorbed_from(rounded: RoundedConstant) -> str:
    if rounded.absorbed_from == 0:
        return "0 (always)"
    return "never" if math.isinf(rounded.absorbed_from) else number(rounded.absorbed_from)
