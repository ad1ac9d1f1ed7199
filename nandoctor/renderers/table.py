"""Make rows of tables: layers near the first non-finite one, or all as a tree; and small constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

from nandoctor.evidence.report import EpsUse, LayerRow, Report, Runs
from nandoctor.evidence.trace import Place, head_run
from nandoctor.renderers.facts import short_name
from nandoctor.renderers.layers import LayerPair, Layers, align_calls, select_layers
from nandoctor.text import constant, file_line, number, part_of, percent, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One layer. `headroom_bits` is that of the fp32 value, or of autocast's if fp32 has none; inf if all are zero.

    `room` is its ratio to the headroom of values near one, 0 to 1, for a bar.
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

    `common` is the module path that every name begins with; it may be left off if space is short.
    """

    title: str
    common: str
    headings: tuple[str, ...]
    rows: tuple[TableRow, ...]
    legend: str


def make_table(report: Report, *, before: int = 5, after: int = 2) -> LayerTable | None:
    """Return the layers around the first non-finite one, else around the tightest; None if nothing was run."""
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
        legend=_legend(rows, layers, report.runs),
    )


def common_path(modules: Iterable[str]) -> str:
    """Return the path, with its trailing dot, of the module that holds all of these; the root is ignored."""
    owners = [module.split(".")[:-1] for module in modules if module]
    shared = takewhile(lambda steps: len(set(steps)) == 1, zip(*owners, strict=False))
    return printable("".join(f"{steps[0]}." for steps in shared))


def make_row(runs: Runs, pair: LayerPair, *, first_nonfinite: bool) -> TableRow:
    """Make the row of one call in both runs."""
    known = [row.headroom_bits for row in (pair.fp32, pair.autocast) if row and row.headroom_bits is not None]
    row, bits = pair.autocast, (known[0] if known else None)
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


def _range(row: LayerRow | None) -> str:
    """Return the largest magnitude, or the kinds of non-finite values; "-" for a call that the run never finished."""
    if row is None or not row.outputs:
        return "-"
    if row.finite:
        return "-" if row.absmax is None else number(row.absmax)
    kinds = {kind for stats in row.outputs if stats.counts for kind in stats.counts.kinds}
    if not kinds:
        return "NaN/Inf"
    signs = "".join(sign for sign in "+-" if f"{sign}inf" in kinds).replace("+-", "±")
    return " ".join(word for word in ("NaN" * ("nan" in kinds), f"{signs}Inf" * bool(signs)) if word)


def _legend(rows: tuple[TableRow, ...], layers: Layers, runs: Runs) -> str:
    first = "first that receives a non-finite input" if layers.before_nonfinite else "first non-finite"
    too_large = f"first whose fp32 value {runs.autocast.dtype} cannot hold"
    meanings = {">": first, "!": too_large, "*": f"{first}, and {too_large}"}
    marks = {row.mark for row in rows}
    return "; ".join(f"{mark} {meaning}" for mark, meaning in meanings.items() if mark in marks)


MAX_ROWS = 3000
UNFOLDED = 60
"""A model with more rows is folded, except on the path to the first non-finite layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow:
    """One call. `parent` is the index of the enclosing row, None at the top; `path` + `name` is the label.

    `folded` hides the rows inside; `shown` is True if no enclosing row is folded.
    """

    cells: TableRow
    parent: int | None
    depth: int
    path: str
    name: str
    has_children: bool
    folded: bool
    shown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTree:
    """The rows, only those around the first non-finite one for very large models, and the number of all calls."""

    rows: tuple[TreeRow, ...]
    num_calls: int


def make_tree(report: Report) -> LayerTree:
    """Return all calls with their numbers; an empty tree if nothing was run."""
    if report.runs is None:
        return LayerTree(rows=(), num_calls=0)
    pairs = align_calls(report.runs)
    layers = select_layers(report)
    nonfinite = None if layers.first_nonfinite is None else layers.pairs[layers.first_nonfinite].place
    ordered = _sort(_keep_near(pairs, nonfinite))
    parents = _find_parents(ordered)
    holders = set(parents)
    unfolded = _find_unfolded(ordered, parents, nonfinite)
    rows: list[TreeRow] = []
    for place, (pair, parent) in enumerate(zip(ordered, parents, strict=True)):
        around = None if parent is None else rows[parent]
        owner = "" if parent is None else ordered[parent].place.module
        path = f"{owner}." if owner else ""
        rows.append(
            TreeRow(
                cells=make_row(report.runs, pair, first_nonfinite=pair.place == nonfinite),
                parent=parent,
                depth=0 if around is None else around.depth + 1,
                path=printable(path),
                name=printable(replace(pair.place, module=pair.place.module.removeprefix(path)).label),
                has_children=place in holders,
                folded=place in holders and around is not None and place not in unfolded,
                shown=around is None or (around.shown and not around.folded),
            )
        )
    return LayerTree(rows=tuple(rows), num_calls=len(pairs))


def _keep_near(pairs: Sequence[LayerPair], nonfinite: Place | None) -> Sequence[LayerPair]:
    if len(pairs) <= MAX_ROWS:
        return pairs
    center = next((place for place, pair in enumerate(pairs) if pair.place == nonfinite), 0)
    start = min(max(center - MAX_ROWS // 2, 0), len(pairs) - MAX_ROWS)
    return pairs[start : start + MAX_ROWS]


def _sort(pairs: Sequence[LayerPair]) -> tuple[LayerPair, ...]:
    """Sort modules before their children, and siblings by the first return of any call inside them."""
    first_seen: dict[str, int] = {}
    for place, pair in enumerate(pairs):
        for path in _ancestry(pair.place.module):
            first_seen.setdefault(path, place)

    def key(pair: LayerPair) -> tuple[list[int], int]:
        return [first_seen[path] for path in _ancestry(pair.place.module)], pair.place.call

    return tuple(sorted(pairs, key=key))


def _ancestry(module: str) -> Iterator[str]:
    """Yield the paths from the root down to the module itself."""
    yield ""
    if module:
        yield from accumulate(module.split("."), "{}.{}".format)


def _find_parents(pairs: Sequence[LayerPair]) -> list[int | None]:
    """Return for each call the index of the first call of the nearest called module around it, or None."""
    first_call: dict[str, int] = {}
    parents = []
    for place, pair in enumerate(pairs):
        *around, module = _ancestry(pair.place.module)
        parents.append(next((first_call[path] for path in reversed(around) if path in first_call), None))
        first_call.setdefault(module, place)
    return parents


def _find_unfolded(pairs: Sequence[LayerPair], parents: Sequence[int | None], nonfinite: Place | None) -> set[int]:
    """Return the indices of calls to unfold: all; in a large model those on the path to the first non-finite layer."""
    if len(pairs) <= UNFOLDED:
        return set(range(len(pairs)))
    opened = set()
    place = next((place for place, pair in enumerate(pairs) if pair.place == nonfinite), None)
    while place is not None:
        opened.add(place)
        place = parents[place]
    return opened


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """A line of a table: its cells, and whether it shows a failure."""

    cells: tuple[str, ...]
    failed: bool


CONSTANT_HEADINGS = ("constant", "in", "line", "used by", "becomes")


def list_small_constants(uses: Iterable[EpsUse]) -> list[TableLine]:
    """Return a table of small constants: value, owner, line, the op that used it, and what is left of it."""
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
    """Return where a small constant is, and what is left of it: "norm (net.py:45), used by add, is zero in fp16"."""
    line = f" ({_describe_line(use)})" if use.source else ""
    used = f", used by {printable(use.op)}," if use.op else ""
    return f"{_describe_owner(use)}{line}{used} {_describe_effect(use)}"


def _describe_effect(use: EpsUse) -> str:
    """Return what its format made of a small constant."""
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
