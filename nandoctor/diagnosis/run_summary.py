"""Summarises runs for the report: two of them side by side, call by call, and the source around an expression."""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Mapping

import numpy as np

from nandoctor.evidence.formats import EDGE, FP16, FloatFormat
from nandoctor.evidence.report import WRONG, LayerRow, Runs, RunSummary, SourceExcerpt
from nandoctor.evidence.trace import SourceLine, TensorStats, Trace, largest_of
from nandoctor.source_files import parse
from nandoctor.text import relative_path


def summarize_runs(trace: Trace, reference: Trace, low: FloatFormat) -> Runs:
    """Return both runs, row by row."""
    return Runs(autocast=_summarize(trace, reference, low), fp32=_summarize(reference, trace, low))


def _summarize(trace: Trace, other: Trace, low: FloatFormat) -> RunSummary:
    return RunSummary(
        dtype=trace.format,
        policy=trace.policy,
        training=trace.training,
        seed=trace.seed,
        finite=trace.finite,
        raised=trace.raised,
        elapsed_s=trace.elapsed_s,
        output=trace.output,
        modules=align(trace, other, low),
    )


def tabulate(runs: Runs | None) -> list[dict[str, object]]:
    """Return one plain row per module call, both runs side by side, for a notebook or a spreadsheet."""
    if runs is None:
        return []
    references = {row.place.key: row for row in runs.fp32.modules}
    return [
        {
            "module": row.place.module,
            "type": row.place.type,
            "call": row.place.call,
            "finite": row.finite,
            "absmax": row.absmax,
            "fp32_absmax": other.absmax if other else None,
            "fp32_finite": other.finite if other else None,
            "rel_err": row.rel_err,
            "headroom_bits": row.headroom_bits,
            "num_bad": sum(stats.counts.num_bad for stats in row.outputs if stats.counts is not None),
        }
        for row in runs.autocast.modules
        for other in [references.get(row.place.key)]
    ]


def align(trace: Trace, reference: Trace, low: FloatFormat) -> tuple[LayerRow, ...]:
    """Return the calls of `trace` in the order in which they returned, each compared with that of `reference`.

    Headroom is measured against `low`, whatever format the trace ran in. Calls that never returned come last.
    """
    others, rows = {call.key: call for call in reference.calls}, list[LayerRow]()
    for call in sorted(trace.calls, key=lambda call: math.inf if call.leave is None else call.leave):
        other, absmax = others.get(call.key), largest_of(call.outputs)
        row = LayerRow(
            place=call.place,
            depth=call.depth,
            inputs=call.inputs,
            outputs=call.outputs,
            headroom_bits=None if absmax is None else low.headroom_bits(absmax),
            rel_err=relative_error(call.outputs, other.outputs) if other else None,
            inherited_err=relative_error(call.inputs, other.inputs) if other else None,
            state=call.state,
        )
        rows.append(row)
    return tuple(rows)


def relative_error(tensors: tuple[TensorStats, ...], references: tuple[TensorStats, ...]) -> float | None:
    """Return ||a - b|| / ||b|| over the sampled elements that are finite in both, or None if there are none.

    Values at the limits of their formats are left out: they stand for -inf in masks, and differ between formats.
    """
    by_path: Mapping[str, TensorStats] = {stats.path: stats for stats in references}
    difference = norm = 0.0
    compared = 0
    for stats in tensors:
        other = by_path.get(stats.path)
        if other is None or other.shape != stats.shape or stats.sample is None or other.sample is None:
            continue
        both = np.isfinite(stats.sample) & np.isfinite(other.sample)
        if not both.any():  # common after a failure
            continue
        a, b = stats.sample.astype(np.float64), other.sample.astype(np.float64)
        at_edge = np.abs(b) >= EDGE * other.dtype.max
        both &= ~(at_edge & (np.abs(a) >= EDGE * FP16.max) & (np.sign(a) == np.sign(b)))
        compared += int(both.sum())
        difference += float(np.square(a[both] - b[both]).sum())
        norm += float(np.square(b[both]).sum())
    if not compared:
        return None
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / norm)


def worst_error(tensors: tuple[TensorStats, ...], references: tuple[TensorStats, ...]) -> float:
    """Return the largest relative error of one of the tensors, which larger ones beside it do not hide."""
    return max((relative_error((stats,), references) or 0.0 for stats in tensors), default=0.0)


def outputs_differ(tensors: tuple[TensorStats, ...], references: tuple[TensorStats, ...]) -> bool:
    """Return True if the finite values of a tensor are too far from fp32's for mere rounding."""
    return worst_error(tensors, references) > WRONG


CONTEXT = 3
_TAB = 4
_MAX_LINES = 40
_LONGEST_LINE = 400

_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_excerpt(source: SourceLine) -> SourceExcerpt | None:
    """Return the expression's lines with a few around them, or None if the file is gone or has another line there."""
    lines = linecache.getlines(source.file)
    if not 0 < source.line <= len(lines) or lines[source.line - 1].strip() != source.text:
        return None
    end_line = min(source.end_line or source.line, len(lines), source.line + _MAX_LINES)
    tree = parse("".join(lines))
    nodes = [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, _Scope)]  # outer ones first
    scopes = [node for node in nodes if node.lineno <= source.line <= (node.end_lineno or node.lineno)]
    inner = next((scope for scope in reversed(scopes) if not isinstance(scope, ast.ClassDef)), None)
    first = max(inner.lineno if inner else 1, source.line - CONTEXT)
    last = min(inner.end_lineno or len(lines) if inner else len(lines), end_line + CONTEXT)
    known = source.column is not None and source.end_column is not None and end_line == source.end_line
    return SourceExcerpt(
        file=source.file,
        path=relative_path(source.file),
        function=".".join(scope.name for scope in scopes),
        first=first,
        lines=tuple(line.rstrip().expandtabs(_TAB)[:_LONGEST_LINE] for line in lines[first - 1 : last]),
        line=source.line,
        end_line=end_line,
        column=_place(lines[source.line - 1], source.column) if known else None,
        end_column=_place(lines[end_line - 1], source.end_column) if known else None,
    )


def _place(line: str, offset: int | None) -> int:
    """Return the column of a byte offset in the line, in characters and with tabs expanded."""
    before = line.encode()[: offset or 0].decode(errors="replace")
    return min(len(before.expandtabs(_TAB)), _LONGEST_LINE)
