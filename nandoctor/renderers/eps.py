"""What `nandoctor eps` prints: numbers in each format, and the small constants of a model or a replay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nandoctor.diagnosis.eps_audit import OUTLOOK, describe_rounding, in_half_precision, in_mixed_precision
from nandoctor.evidence.formats import RoundedConstant
from nandoctor.evidence.report import EpsUse
from nandoctor.renderers.console import literal, plain_table, print_parts
from nandoctor.renderers.jsonfile import dumps
from nandoctor.text import brief, constant, file_line, number, percent, printable, shorten

SCHEMA = "nandoctor.eps/1"
_PLACE_WIDTH, _TYPE_WIDTH, _LINE_WIDTH = 19, 16, 24

_WARNING = {"zero": "red", "overflow": "red", "subnormal": "yellow"}


def dumps_eps(rounded_constants: Iterable[RoundedConstant], uses: Iterable[EpsUse]) -> str:
    """Both lists as JSON text."""
    return dumps({"schema": SCHEMA, "values": [*rounded_constants], "uses": [*uses]})


def print_rounded(rounded_constants: Sequence[RoundedConstant], console: Console) -> None:
    """Print one block for each number, one line for each format."""
    for place, value in enumerate(dict.fromkeys(rounded.value for rounded in rounded_constants)):
        table = _table(constant(value), "becomes", "which is", "lost when added to |x| >=")
        for rounded in (rounded for rounded in rounded_constants if rounded.value == value):
            cells = (
                rounded.format.label,
                constant(rounded.rounded),
                describe_rounding(rounded),
                _absorbed_from(rounded),
            )
            table.add_row(*map(literal, cells), style=_WARNING.get(rounded.effect, ""))
        print_parts([*([Text()] if place else []), table], console)


def print_uses(uses: Sequence[EpsUse], console: Console) -> None:
    """Print what a replay saw: the format that each constant was used in, and what it did there."""
    if not uses:
        print_parts(
            [literal("The replay met no eps: neither in a module, nor in an op, nor in the optimizer.")], console
        )
        return
    table = _table("where", "line", "eps", "used by", "in", "became")
    for use in uses:
        cells = (_place(use), _line(use), constant(use.value), use.op or "", str(use.dtype or ""), _outcome(use))
        table.add_row(*map(literal, cells), style=_WARNING.get(use.effect or "", ""))
    print_parts([table], console)


def print_outlook(uses: Sequence[EpsUse], console: Console) -> None:
    """Print what half precision would make of each constant, and what mixed precision does."""
    if not uses:
        print_parts(
            [literal("No module has an eps among its attributes. One that is written in a line shows in a replay:")],
            console,
        )
        print_parts([literal("nandoctor eps --model SPEC --dump DUMP")], console)
        return
    table = _table("module", "type", "eps", ".half()", "autocast")
    for use in uses:
        cells = (_place(use), brief(use.type, _TYPE_WIDTH), constant(use.value))
        table.add_row(*map(literal, (*cells, in_half_precision(use), in_mixed_precision(use))))
    print_parts([table, Text(), literal(OUTLOOK)], console)


def _table(*headings: str) -> Table:
    table = plain_table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _absorbed_from(rounded: RoundedConstant) -> str:
    if rounded.absorbed_from == 0:
        return "0 (always)"
    return "never" if math.isinf(rounded.absorbed_from) else number(rounded.absorbed_from)


def _place(use: EpsUse) -> str:
    if use.place == "optimizer":
        return "optimizer"
    name = f"{use.module}.{use.name}".lstrip(".") if use.place == "module" else use.module or "(the model)"
    more = f" x{use.num_uses}" if use.num_uses > 1 else ""
    return shorten(printable(name), _PLACE_WIDTH - len(more)) + more


def _line(use: EpsUse) -> str:
    if use.source is None:
        return ""
    return shorten(file_line(use.source.file, use.source.line), _LINE_WIDTH)


def _outcome(use: EpsUse) -> str:
    """The worst that is known of it."""
    if use.effect is None:
        return "not seen in use"
    if use.effect == "zero" or use.rel_err is None:
        return "zero"
    held = "held" if use.effect == "normal" else f"subnormal, {percent(use.rel_err)} off"
    if use.absorbed_share:
        return f"{held}; absorbed by {percent(use.absorbed_share)}"
    return held if use.bound_share is None else f"{held}; bound {percent(use.bound_share)}"
