"""The document of `nandoctor eps`: numbers in each format, and the small constants of a model or a replay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nandoctor.diagnosis.eps_audit import OUTLOOK, describe_rounding, in_half_precision, in_mixed_precision
from nandoctor.evidence.formats import RoundedConstant
from nandoctor.evidence.report import EpsUse
from nandoctor.renderers.blocks import Block, Column, Fact, Facts, Section, Table, Text, Tone
from nandoctor.renderers.jsonfile import dumps
from nandoctor.renderers.trials import constant_facts
from nandoctor.text import constant, number

SCHEMA = "nandoctor.eps/1"
_MIN_NAME_WIDTH = 14
_TONES: dict[str, Tone] = {"zero": "failed", "overflow": "failed", "subnormal": "unclear"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsAnswer:
    """What the verb was asked: numbers in each format, and the constants of a model, seen in a replay or not run."""

    values: Sequence[RoundedConstant]
    uses: Sequence[EpsUse]
    asks: Literal["values", "model", "dump"]


def dumps_eps(answer: EpsAnswer) -> str:
    """Return both lists as JSON text."""
    return dumps({"schema": SCHEMA, "values": answer.values, "uses": answer.uses})


def eps_document(answer: EpsAnswer) -> Iterator[Block]:
    """Yield a table for each number, then the constants of the model or of the replay."""
    for value in dict.fromkeys(rounded.value for rounded in answer.values):
        yield Section("", [_formats([rounded for rounded in answer.values if rounded.value == value])])
    if answer.asks == "dump":
        yield Section("", [_seen(answer.uses)])
    elif answer.asks == "model":
        yield from _outlook(answer.uses)


def _formats(rows: Sequence[RoundedConstant]) -> Table:
    """Return what each format makes of one number."""
    columns = (
        Column(constant(rows[0].value), [rounded.format.label for rounded in rows]),
        Column("becomes", [constant(rounded.rounded) for rounded in rows]),
        Column("which is", [describe_rounding(rounded) for rounded in rows]),
        Column("lost when added to |x| >=", [_absorbed_from(rounded) for rounded in rows]),
    )
    return Table(columns=columns, tones=[_TONES.get(row.effect, "") for row in rows])


def _seen(uses: Sequence[EpsUse]) -> Block:
    """Return where each constant of a replay is, and what its format made of it."""
    if not uses:
        return Text("The replay found no eps in a module, an op or the optimizer.")
    return Facts(constant_facts(uses))


def _outlook(uses: Sequence[EpsUse]) -> Iterator[Block]:
    """Yield what half precision would make of each constant of a model, and what mixed precision does."""
    if not uses:
        nothing = Text("No module has an eps attribute. An eps that is written into the code shows up in a replay:")
        yield Section("", [nothing, Facts([Fact("next", "nandoctor eps --model SPEC --dump DUMP", is_command=True)])])
        return
    columns = (
        Column("module", [_place(use) for use in uses], least=_MIN_NAME_WIDTH),
        Column("type", [use.type for use in uses], least=_MIN_NAME_WIDTH),
        Column("eps", [constant(use.value) for use in uses]),
        Column(".half()", [in_half_precision(use) for use in uses]),
        Column("autocast", [in_mixed_precision(use) for use in uses]),
    )
    yield Section("", [Table(columns=columns, legend=OUTLOOK)])


def _absorbed_from(rounded: RoundedConstant) -> str:
    if rounded.absorbed_from == 0:
        return "0 (always)"
    return "never" if math.isinf(rounded.absorbed_from) else number(rounded.absorbed_from)


def _place(use: EpsUse) -> str:
    return f"{use.module}.{use.name}".lstrip(".") + (f" x{use.num_uses}" if use.num_uses > 1 else "")
