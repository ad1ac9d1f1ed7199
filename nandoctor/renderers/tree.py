"""Every layer of both runs as the rows of a tree: by the paths of the modules, in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nandoctor.evidence.report import Report
from nandoctor.evidence.trace import Place
from nandoctor.renderers.layers import LayerPair, align_calls, select_layers
from nandoctor.renderers.table import TableRow, make_row
from nandoctor.text import printable

MAX_ROWS = 3000
UNFOLDED = 60
"""As many rows are shown at once; of a larger model only the way to the first non-finite layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow:
    """One call. `parent` is the number of the row that holds this one, None at the top; `path` + `name` is the label.

    `folded` hides the rows inside, `shown` tells that no row around this one is folded.
    """

    cells: TableRow
    number: int
    parent: int | None
    depth: int
    path: str
    name: str
    has_children: bool = False
    folded: bool = False
    shown: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTree:
    """The rows, and how many calls there are in all; of very large models those around the first non-finite one."""

    rows: tuple[TreeRow, ...]
    num_calls: int


def make_tree(report: Report) -> LayerTree:
    """All calls with their numbers; empty where nothing was run."""
    if report.runs is None:
        return LayerTree(rows=(), num_calls=0)
    pairs = align_calls(report.runs)
    nonfinite = select_layers(report).first_nonfinite_place
    ordered = _order(_keep(pairs, nonfinite))
    cells = [make_row(report.runs, pair, first_nonfinite=pair.place == nonfinite) for pair in ordered]
    return LayerTree(rows=_fold(_nest(ordered, cells)), num_calls=len(pairs))


def _keep(pairs: Sequence[LayerPair], nonfinite: Place | None) -> Sequence[LayerPair]:
    if len(pairs) <= MAX_ROWS:
        return pairs
    center = next((place for place, pair in enumerate(pairs) if pair.place == nonfinite), 0)
    start = min(max(center - MAX_ROWS // 2, 0), len(pairs) - MAX_ROWS)
    return pairs[start : start + MAX_ROWS]


def _order(pairs: Sequence[LayerPair]) -> tuple[LayerPair, ...]:
    """Modules before what they hold, siblings in the order in which anything inside them first returned."""
    first_seen: dict[str, int] = {}
    for place, pair in enumerate(pairs):
        for path in _ancestry(pair.place.module):
            first_seen.setdefault(path, place)

    def key(pair: LayerPair) -> tuple[list[int], int]:
        return [first_seen[path] for path in _ancestry(pair.place.module)], pair.place.call

    return tuple(sorted(pairs, key=key))


def _ancestry(module: str) -> Iterator[str]:
    """The paths from the root down to the module itself."""
    yield ""
    steps = module.split(".") if module else []
    for depth in range(1, len(steps) + 1):
        yield ".".join(steps[:depth])


def _nest(pairs: Sequence[LayerPair], cells: Sequence[TableRow]) -> list[TreeRow]:
    """Each call below the first call of the nearest module around it that was called at all."""
    owners: dict[str, int] = {}
    rows: list[TreeRow] = []
    for place, pair in enumerate(pairs):
        module = pair.place.module
        around = [path for path in _ancestry(module) if path in owners and path != module]
        parent = owners[around[-1]] if around else None
        path = f"{around[-1]}." if around and around[-1] else ""
        owners.setdefault(module, place)
        rows.append(
            TreeRow(
                cells=cells[place],
                number=place,
                parent=parent,
                depth=0 if parent is None else rows[parent].depth + 1,
                path=printable(path),
                name=printable(replace(pair.place, module=module.removeprefix(path)).label),
            )
        )
    holders = {row.parent for row in rows}
    return [replace(row, has_children=row.number in holders) for row in rows]


def _fold(rows: Sequence[TreeRow]) -> tuple[TreeRow, ...]:
    """Open everything in a small model, in a large one what leads to the first non-finite layer and the top."""
    way: set[int | None] = set()
    place = next((row.number for row in rows if row.cells.first_nonfinite), None)
    while place is not None:
        way.add(place)
        place = rows[place].parent
    folded: list[TreeRow] = []
    for row in rows:
        around = folded[row.parent] if row.parent is not None else None
        shown = around is None or (around.shown and not around.folded)
        closed = len(rows) > UNFOLDED and row.has_children and row.depth > 0 and row.number not in way
        folded.append(replace(row, folded=closed, shown=shown))
    return tuple(folded)
