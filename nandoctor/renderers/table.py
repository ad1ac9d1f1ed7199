"""The layers around the first non-finite one, as the cells of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from nandoctor.evidence.report import LayerRow, Report, Runs
from nandoctor.evidence.trace import head_run
from nandoctor.renderers.layers import LayerPair, Layers, select_layers
from nandoctor.text import number, part_of, percent, printable

LAYERS_BEFORE = 5
LAYERS_AFTER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One layer. `headroom_bits` is that of the fp32 value, or of autocast's where fp32 has none; inf for all zero.

    `room` is its share of what values near one have, 0 to 1, for a bar.
    `first_nonfinite` marks the first non-finite layer, `unholdable` the first whose fp32 value the format cannot hold.
    """

    layer: str
    type: str
    autocast: str
    fp32: str
    rel_err: str
    inherited_err: str
    headroom_bits: float | None
    room: float
    finite: bool
    first_nonfinite: bool
    unholdable: bool

    @property
    def mark(self) -> str:
        """One letter: ">" first non-finite, "!" first that does not fit, "*" both at once."""
        return {(True, True): "*", (True, False): ">", (False, True): "!"}.get(
            (self.first_nonfinite, self.unholdable), " "
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """A few rows out of all layers.

    `common` is the module path that every name begins with, and that may be left off where room is scarce.
    """

    title: str
    common: str
    headings: tuple[str, ...]
    rows: tuple[TableRow, ...]
    legend: str


def make_table(report: Report, *, before: int = LAYERS_BEFORE, after: int = LAYERS_AFTER) -> LayerTable | None:
    """The layers around the first non-finite one, else around the tightest; None where nothing was run."""
    layers = select_layers(report)
    center = layers.tightest() if layers.first_nonfinite is None else layers.first_nonfinite
    if report.runs is None or center is None:
        return None
    shown = layers.window(center, before, after)
    rows = tuple(
        make_row(report.runs, layers.pairs[index], first_nonfinite=index == layers.first_nonfinite) for index in shown
    )
    run = report.runs.autocast
    part = part_of(shown.stop, len(layers.pairs))
    return LayerTable(
        title=f"Largest magnitudes, layers {shown.start + 1:,} to {part} in execution order",
        common=common_path(layers.pairs[index].place.module for index in shown),
        headings=("layer", "type", head_run(run.policy, run.dtype), "fp32", "rel err", "headroom"),
        rows=rows,
        legend="; ".join(_legend(rows, layers, report.runs)),
    )


def common_path(modules: Iterable[str]) -> str:
    """The path of the module that holds all of these, with its dot; the root itself does not count."""
    owners = [module.split(".")[:-1] for module in modules if module]
    shared = takewhile(lambda steps: len(set(steps)) == 1, zip(*owners, strict=False))
    return printable("".join(f"{steps[0]}." for steps in shared))


def make_row(runs: Runs, pair: LayerPair, *, first_nonfinite: bool) -> TableRow:
    """One call in both runs."""
    row, bits = pair.autocast, _headroom(pair)
    return TableRow(
        layer=printable(pair.label),
        type=printable(pair.place.type),
        autocast=_range(pair.autocast),
        fp32=_range(pair.fp32),
        rel_err=_error(row.rel_err if row else None),
        inherited_err=_error(row.inherited_err if row else None),
        headroom_bits=bits,
        room=min(max((bits or 0.0) / (runs.autocast.dtype.max_exponent + 1), 0.0), 1.0),
        finite=all(row.finite for row in pair.rows),
        first_nonfinite=first_nonfinite,
        unholdable=pair.place == runs.first_unholdable,
    )


def _error(error: float | None) -> str:
    return "-" if error is None else percent(error)


def _headroom(pair: LayerPair) -> float | None:
    known = [row.headroom_bits for row in (pair.fp32, pair.autocast) if row and row.headroom_bits is not None]
    return known[0] if known else None


def _range(row: LayerRow | None) -> str:
    """The largest magnitude, or which non-finite values there are; "-" for a call that the run never finished."""
    if row is None or not row.outputs:
        return "-"
    if row.finite:
        return "-" if row.absmax is None else number(row.absmax)
    kinds = {kind for stats in row.outputs if stats.counts for kind in stats.counts.kinds}
    if not kinds:
        return "NaN/Inf"
    signs = "".join(sign for sign in "+-" if f"{sign}inf" in kinds).replace("+-", "±")
    return " ".join(word for word in ("NaN" * ("nan" in kinds), f"{signs}Inf" * bool(signs)) if word)


def _legend(rows: tuple[TableRow, ...], layers: Layers, runs: Runs) -> Iterator[str]:
    marks = {row.mark for row in rows}
    first = "first that receives a non-finite input" if layers.before_nonfinite else "first non-finite"
    too_large = f"first whose fp32 value {runs.autocast.dtype} cannot hold"
    if ">" in marks:
        yield f"> {first}"
    if "!" in marks:
        yield f"! {too_large}"
    if "*" in marks:
        yield f"* {first}, and {too_large}"
