"""A tensor in one line."""

from __future__ import annotations

from dataclasses import replace

from nandoctor.causes.sentences import find_operand, place_of_operand
from nandoctor.evidence.report import Origin
from nandoctor.evidence.trace import NonfiniteCounts, TensorStats
from nandoctor.text import join_first, nonfinite_part, number, percent, printable, shape_text


def list_operands(origin: Origin) -> list[tuple[str, str]]:
    """The tensors of an operation, each by its text in the code or by its place, and in one line; the result last.

    Of a saved array that is to blame there is the array alone.
    """
    if origin.op is None:
        return [] if origin.output is None else [("as saved", describe_tensor(origin.output))]
    op, alone, backward = origin.op, len(origin.inputs) == 1, origin.phase == "backward"
    expression = origin.source.expression if origin.source is not None and not backward else ""
    operands = []
    for stats in origin.inputs:
        text = find_operand(expression, op, stats.path, alone=False)
        name = text or place_of_operand(op, stats.path, alone=alone) or "incoming gradient"
        operands.append((name, describe_tensor(replace(stats, path=""))))
    result = (
        [("outgoing gradient" if backward else "result", describe_tensor(origin.output))]
        if origin.output is not None
        else []
    )
    return [*dict.fromkeys(operands), *result]  # x * x reads one tensor


def describe_tensor(stats: TensorStats) -> str:
    """Format, shape, range of the finite values, and what is non-finite or lost."""
    name = f"{printable(stats.path)}: " if stats.path else ""
    parts = [f"{name}{stats.dtype} {shape_text(stats.shape)}", *_describe_range(stats)]
    if stats.counts is not None and stats.counts.num_bad:
        parts.append(_describe_nonfinite(stats.counts, stats))
    elif not stats.finite:
        parts.append("not all finite")
    if stats.counts is not None and stats.counts.num_zero:
        parts.append(f"{percent(stats.counts.num_zero / stats.numel)} zeros")
    return ", ".join(parts)


def _describe_range(stats: TensorStats) -> list[str]:
    if stats.absmax is None:
        return [] if stats.finite or stats.counts is None else ["no finite value"]
    if stats.min is None or stats.max is None:
        return [f"absmax {number(stats.absmax)}"]
    median = f", median magnitude {number(stats.median)}" if stats.median is not None else ""
    return [f"{number(stats.min)} to {number(stats.max)}{median}"]


def _describe_nonfinite(counts: NonfiniteCounts, stats: TensorStats) -> str:
    text = nonfinite_part(counts.kinds, counts.num_bad, stats.numel)
    if not counts.samples or len(stats.shape) < 2 or len(counts.samples) == stats.shape[0]:
        return text
    noun = "indexes" if len(counts.samples) > 1 else "index"
    return f"{text} ({noun} {join_first([str(index) for index in counts.samples], 3)} of dimension 0)"
