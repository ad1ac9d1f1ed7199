"""Follows a value or gradient that is too large back to where it came from: which steps made it grow, by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from nandoctor.diagnosis.conclusion import Findings
from nandoctor.evidence.report import Growth, Origin
from nandoctor.evidence.trace import OpCall, OpTensor, Place, Trace, largest_of
from nandoctor.ops import CASTS, DIVISIONS, MOVES
from nandoctor.text import code, number

_WORTH_TELLING = 4.0
"""Bits that a step must add to be named in a sentence."""


def follow_growth(origin: Origin, trace: Trace) -> Iterator[Growth]:
    """Yield the steps that made the origin's value so large, from there down to a weight or an array of the batch.

    Each follows the operand that gave most. There are none if nothing overflowed in the forward or the loss.
    """
    is_overflow = origin.phase in ("forward", "loss") and origin.would_be is not None
    op, made = trace.by_key.get(key_of(origin)) if is_overflow else None, abs(origin.would_be or 0.0)
    while op is not None:
        given = max(op.inputs, key=partial(_bits_given, op), default=None)
        taken = given.stats.absmax if given is not None and given.stats is not None else None
        if op.op not in MOVES | CASTS or taken is None:
            yield _step(op, taken, made)
        if given is None or taken is None:
            return
        if given.producer is None:
            owner = Place(module=given.path, type="", call=0)
            yield Growth(place=owner, op=given.origin, source=None, absmax_in=None, absmax_out=taken, log2_gain=None)
            return
        op, made = trace.ops[given.producer], taken


def key_of(origin: Origin) -> tuple[str, int, str, int]:
    """Return the key of an origin's op, as which the traces of all runs have it."""
    return (*origin.place.key, origin.op or "", origin.nth)


def _step(op: OpCall, taken: float | None, made: float | None) -> Growth:
    gain = math.log2(made / taken) if made and taken else None
    return Growth(place=op.place, op=op.op, source=op.own_line, absmax_in=taken, absmax_out=made, log2_gain=gain)


def _bits_given(op: OpCall, tensor: OpTensor) -> float:
    """Return by how many powers of two an operand may enlarge the result: a divisor does by being small."""
    stats = tensor.stats
    if stats is None or not stats.absmax:
        return -math.inf
    if op.op in DIVISIONS and tensor.name != "self":
        return -math.log2(stats.p05 or stats.absmax)
    return math.log2(stats.absmax)


def follow_gradient(origin: Origin, trace: Trace) -> Iterator[Growth]:
    """Yield the steps that made the gradient at an origin so large, from there up to the loss."""
    op = next((op for op in trace.backward if op.key == key_of(origin)), None)
    while op is not None:
        taken = [tensor.stats for tensor in op.inputs if tensor.stats is not None]
        yield _step(op, largest_of(taken), largest_of(op.outputs))
        readers = {reader.order for reader in trace.ops if op.forward in {tensor.producer for tensor in reader.inputs}}
        before = [other for other in trace.backward[: op.order] if other.forward in readers]
        op = max(before, key=lambda other: largest_of(other.outputs) or 0.0, default=None)


def describe_growth(growth: Sequence[Growth], *, of_gradient: bool) -> tuple[str, ...]:
    """Return a note on the step before the origin that gave most, if that is much; else on the weight that it is of."""
    steps = [step for step in growth[1:] if (step.log2_gain or 0.0) >= _WORTH_TELLING]
    if not steps:
        weights = (step for step in growth[-1:] if step.op == "weight" and step.absmax_out)
        return tuple(f"It comes from {code(it.place.module)}, which reaches {number(it.absmax_out)}." for it in weights)
    most = max(steps, key=lambda step: step.log2_gain or 0.0)
    behind = growth[growth.index(most) + 1 :]
    named = f" ({code(behind[0].place.module)})" if behind and behind[0].absmax_in is None else ""
    what = code(most.source.expression) if most.source is not None and most.source.expression else most.op
    grew = f"the gradient grew: that of {what}" if of_gradient else f"it grew: {what}"
    return (
        f"Where {grew} makes {number(most.absmax_out)} of {number(most.absmax_in)}{named}, "
        f"2^{most.log2_gain:.1f} times as much.",
    )


def with_growth(findings: Findings) -> Findings:
    """Return the findings with the growth of the first diagnosis, and a note on it."""
    conclusion = findings.conclusion
    failing = findings.reference if conclusion.in_fp32 else findings.trace
    first = next(iter(conclusion.diagnoses), None)
    growth = findings.growth or tuple(follow_growth(first.origin, failing) if first is not None else ())
    told = describe_growth(growth, of_gradient=bool(findings.growth))
    return replace(findings, growth=growth, notes=(*findings.notes, *told))
