"""Two runs side by side, call by call.

In: the traces of one model under two policies. Out: rows with headroom and relative error, and what fp16 cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import LayerRow
from nandoctor.evidence.trace import ModuleCall, TensorStats, Trace


def align(trace: Trace, reference: Trace, low: FloatFormat) -> tuple[LayerRow, ...]:
    """The calls of `trace` in the order in which they returned, each compared with the same call of `reference`.

    Headroom is judged against `low`, whatever format the trace itself ran in. Calls that never returned come last.
    """
    others = {call.key: call for call in reference.calls}
    returned = sorted(trace.calls, key=lambda call: math.inf if call.leave is None else call.leave)
    return tuple(_row(call, others.get(call.key), low) for call in returned)


def first_unholdable(reference: Trace, low: FloatFormat) -> ModuleCall | None:
    """The first call, in the order of return, whose fp32 output `low` could not hold."""
    returned = sorted((call for call in reference.calls if call.leave is not None), key=lambda call: call.leave or 0)
    return next((call for call in returned if not all(_fits(stats, low) for stats in call.outputs)), None)


def relative_error(tensors: tuple[TensorStats, ...], references: tuple[TensorStats, ...]) -> float | None:
    """||a - b|| / ||b|| over the sampled elements that are finite in both, None where there are none to compare."""
    by_path: Mapping[str, TensorStats] = {stats.path: stats for stats in references}
    difference = norm = 0.0
    compared = 0
    for stats in tensors:
        other = by_path.get(stats.path)
        if other is None or other.shape != stats.shape or stats.sample is None or other.sample is None:
            continue
        a, b = stats.sample.astype(np.float64), other.sample.astype(np.float64)
        both = np.isfinite(a) & np.isfinite(b)
        compared += int(both.sum())
        difference += float(np.square(a[both] - b[both]).sum())
        norm += float(np.square(b[both]).sum())
    if not compared:
        return None
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / norm)


def _row(call: ModuleCall, other: ModuleCall | None, low: FloatFormat) -> LayerRow:
    absmax = max((stats.absmax for stats in call.outputs if stats.absmax is not None), default=None)
    return LayerRow(
        module=call.module,
        type=call.type,
        call=call.call,
        depth=call.depth,
        inputs=call.inputs,
        outputs=call.outputs,
        headroom_bits=None if absmax is None else low.headroom_bits(absmax),
        rel_err=relative_error(call.outputs, other.outputs) if other else None,
        state=call.state,
    )


def _fits(stats: TensorStats, low: FloatFormat) -> bool:
    return stats.absmax is None or low.holds(stats.absmax)
