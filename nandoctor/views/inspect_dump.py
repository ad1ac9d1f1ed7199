"""The document of `nandoctor inspect`: the contents of a dump file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nandoctor.evidence.dump_summary import ArraySummary, DumpSummary
from nandoctor.text import brief, byte_size, join_first, part_of, plural, shape_text
from nandoctor.views.blocks import Block, Column, Fact, Facts, Headline, Table

_LAYOUTS = {
    "plain": "a plain dict of arrays",
    "weights-only": "weights alone",
    "batch-only": "arrays without weights",
    "nandoctor.dump/1": "nandoctor.dump/1",
}
_MAX_ROWS = 20
_MAX_LISTED = 3
_NAME_WIDTH, _LONG_NAME = 32, 64
_MIN_NAME_WIDTH, _MIN_DTYPE_WIDTH = 14, 10


def inspection_document(summary: DumpSummary) -> Iterator[Block]:
    """Yield what the file holds, what is non-finite in it, and what a full replay would miss."""
    yield Headline(summary.path)
    yield from file_blocks(summary)
    remarks = [*(Fact("note", text) for text in summary.notes), *(Fact("missing", text) for text in summary.missing)]
    yield Facts(_first(remarks, ""))


def file_blocks(summary: DumpSummary) -> list[Block]:
    """Return what the file holds, what is non-finite among its weights, and a table of its arrays."""
    facts = Facts([*_outline(summary), *nonfinite_state_facts(summary)])
    arrays = summary.arrays
    if len(arrays) > _MAX_ROWS:  # of which a terminal shows the first
        arrays = tuple(sorted(arrays, key=lambda array: (not array.num_bad, array.role != "output")))
    return [facts, _table(arrays)] if arrays else [facts]


def nonfinite_state_facts(summary: DumpSummary) -> Iterator[Fact]:
    """Yield one line for the non-finite weights and one for the buffers: after a failure all running statistics are."""
    for label, arrays in (("weights", summary.bad_weights), ("buffers", summary.bad_buffers)):
        texts = [f"{brief(it.name, _LONG_NAME)} ({part_of(it.num_bad, math.prod(it.shape))})" for it in arrays]
        if texts:
            yield Fact(label, f"non-finite: {join_first(texts, _MAX_LISTED)}")


def _first(facts: Sequence[Fact], label: str) -> list[Fact]:
    left = len(facts) - _MAX_ROWS
    return [*facts[:_MAX_ROWS], *([Fact(label, f"and {left} more")] if left > 0 else [])]


def _outline(summary: DumpSummary) -> Iterator[Fact]:
    yield Fact("file", f"{byte_size(summary.nbytes)}, {_LAYOUTS[summary.layout]}")
    yield Fact("weights", f"{plural(summary.num_weights, 'tensor')}, {plural(summary.num_parameters, 'value')}")
    yield from _first([Fact(brief(name, _NAME_WIDTH), value) for name, value in summary.scalars], "scalars")


def _table(arrays: Sequence[ArraySummary]) -> Table:
    columns = (
        Column("arrays", [array.name for array in arrays], least=_MIN_NAME_WIDTH),
        Column("shape", [shape_text(array.shape) for array in arrays], spare=1),
        Column("dtype", [array.dtype for array in arrays], least=_MIN_DTYPE_WIDTH, spare=2),
        Column("role", [array.role or "" for array in arrays], spare=3),
        Column("non-finite", [_describe_nonfinite(array) for array in arrays]),
    )
    return Table(columns=columns, tones=["failed" if array.num_bad else "" for array in arrays])


def _describe_nonfinite(array: ArraySummary) -> str:
    counts = ((array.num_nan, "NaN"), (array.num_posinf, "+Inf"), (array.num_neginf, "-Inf"))
    return ", ".join(f"{count:,} {kind}" for count, kind in counts if count) or "none"
