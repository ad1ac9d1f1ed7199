"""Render `nandoctor eps`: numbers in each format, and the small constants of a model or a replay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nandoctor.diagnosis.eps_audit import OUTLOOK, describe_rounding, in_half_precision, in_mixed_precision
from nandoctor.evidence.formats import RoundedConstant
from nandoctor.evidence.report import EpsUse
from nandoctor.renderers.console import labelled, literal, plain_table, print_parts, spaced
from nandoctor.renderers.jsonfile import dumps
from nandoctor.renderers.table import describe_use
from nandoctor.text import brief, constant, number, printable, shorten

SCHEMA = "nandoctor.eps/1"
_PLACE_WIDTH, _TYPE_WIDTH = 19, 16

_WARNING = {"zero": "red", "overflow": "red", "subnormal": "yellow"}


def dumps_eps(rounded_constants: Iterable[RoundedConstant], uses: Iterable[EpsUse]) -> str:
    """Return both lists as JSON text."""
    return dumps({"schema": SCHEMA, "values": [*rounded_constants], "uses": [*uses]})


def print_rounded(rounded_constants: Sequence[RoundedConstant], console: Console) -> None:
    """Print one block per number, with one line per format."""
    tables: dict[float, Table] = {}
    for rounded in rounded_constants:
        headings = (constant(rounded.value), "becomes", "which is", "lost when added to |x| >=")
        table = tables.setdefault(rounded.value, _table(*headings))
        cells = (rounded.format.label, constant(rounded.rounded), describe_rounding(rounded), _absorbed_from(rounded))
        table.add_row(*map(literal, cells), style=_WARNING.get(rounded.effect, ""))
    print_parts(spaced(*([table] for table in tables.values())), console)


def print_uses(uses: Sequence[EpsUse], console: Console) -> None:
    """Print the constants that a replay saw: where each one is, and what its format made of it."""
    lines = [(constant(use.value), literal(describe_use(use), _WARNING.get(use.effect or "", ""))) for use in uses]
    nothing = literal("The replay found no eps in a module, an op or the optimizer.")
    print_parts([labelled(lines) if lines else nothing], console)


def print_outlook(uses: Sequence[EpsUse], console: Console) -> None:
    """Print what half precision would make of each constant, and what mixed precision does."""
    if not uses:
        nothing = "No module has an eps attribute. An eps that is written into the code shows up in a replay:"
        print_parts([literal(nothing), literal("nandoctor eps --model SPEC --dump DUMP")], console)
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
    more = f" x{use.num_uses}" if use.num_uses > 1 else ""
    return shorten(printable(f"{use.module}.{use.name}".lstrip(".")), _PLACE_WIDTH - len(more)) + more
