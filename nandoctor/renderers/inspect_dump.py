"""Render `nandoctor inspect`: the contents of a dump file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType

from nandoctor.evidence.dump_summary import ArraySummary, DumpSummary
from nandoctor.renderers.console import Column, FittedTable, labelled, literal, print_parts, spaced
from nandoctor.text import brief, byte_size, plural, shape_text, shorten

_LAYOUTS = {
    "plain": "a plain dict of arrays",
    "weights-only": "weights alone",
    "batch-only": "arrays without weights",
    "nandoctor.dump/1": "nandoctor.dump/1",
}
_MAX_ROWS = 20
_NAME_WIDTH, _DTYPE_WIDTH = 32, 10
_MIN_NAME_WIDTH = 14


def print_inspection(summary: DumpSummary, console: Console) -> None:
    """Print what the file holds, what is non-finite in it, and what a full replay would miss."""
    tables = {
        "arrays": summary.arrays,
        "non-finite weights": summary.bad_weights,
        "non-finite buffers": summary.bad_buffers,
    }
    remarks = [*(("note", text) for text in summary.notes), *(("missing", text) for text in summary.missing)]
    sections = spaced(
        [literal(summary.path, "bold"), labelled(_outline(summary))],
        *(_cut(_table(title, arrays[:_MAX_ROWS]), arrays) for title, arrays in tables.items() if arrays),
        _cut(labelled(remarks[:_MAX_ROWS]), remarks) if remarks else [],
    )
    print_parts(sections, console)


def _cut(shown: RenderableType, rows: Sequence[object]) -> list[RenderableType]:
    return [shown, *([literal(f"and {len(rows) - _MAX_ROWS} more")] if len(rows) > _MAX_ROWS else [])]


def _outline(summary: DumpSummary) -> Iterator[tuple[str, str]]:
    yield "file", f"{byte_size(summary.nbytes)}, {_LAYOUTS[summary.layout]}"
    yield "weights", f"{plural(summary.num_weights, 'tensor')}, {plural(summary.num_parameters, 'value')}"
    if summary.prefix:
        yield "prefix", f"{brief(summary.prefix)} (taken off every name)"
    for name, value in summary.scalars[:_MAX_ROWS]:
        yield brief(name, _NAME_WIDTH), value
    if len(summary.scalars) > _MAX_ROWS:
        yield "scalars", f"and {len(summary.scalars) - _MAX_ROWS} more"


def _table(title: str, arrays: Sequence[ArraySummary]) -> FittedTable:
    columns = (
        Column(title, [brief(array.name, _NAME_WIDTH) for array in arrays], least=_MIN_NAME_WIDTH),
        Column("shape", [shape_text(array.shape) for array in arrays], spare=1),
        Column("dtype", [shorten(array.dtype, _DTYPE_WIDTH) for array in arrays], spare=2),
        Column("role", [array.role or "" for array in arrays], spare=3),
        Column("non-finite", [_describe_nonfinite(array) for array in arrays]),
    )
    return FittedTable(columns, ["red" if array.num_bad else "" for array in arrays])


def _describe_nonfinite(array: ArraySummary) -> str:
    counts = ((array.num_nan, "NaN"), (array.num_posinf, "+Inf"), (array.num_neginf, "-Inf"))
    return ", ".join(f"{count:,} {kind}" for count, kind in counts if count) or "none"
