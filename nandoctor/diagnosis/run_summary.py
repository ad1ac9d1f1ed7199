"""What the traces say, in the words of the report."""

from __future__ import annotations

from typing import Literal

from nandoctor.diagnosis.first_nonfinite import NonfinitePlace, count_nonfinite
from nandoctor.diagnosis.layer_comparison import align, first_unholdable
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import FirstNonfinite, Runs, RunSummary
from nandoctor.evidence.trace import LOSS, Place, TensorStats, Trace

_PHASES: dict[str, Literal["loss", "input"]] = {"batch": "input", "loss": "loss"}


def describe_first(nonfinite_place: NonfinitePlace, trace: Trace, reference: Trace) -> FirstNonfinite:
    """The first non-finite place as the report keeps it, with what fp32 has at the same place."""
    owner, seen_in = nonfinite_place.owner, nonfinite_place.seen_in
    return FirstNonfinite(
        run="autocast",
        phase=_PHASES.get(nonfinite_place.where, "forward"),
        place=owner.place if owner else Place(module=LOSS if nonfinite_place.where == "loss" else "", type="", call=0),
        where=nonfinite_place.where,
        seen_in=seen_in.place if seen_in else None,
        elements=count_nonfinite(nonfinite_place.value, trace),
        inputs=owner.inputs if owner else (),
        value=nonfinite_place.value,
        would_be=_would_be(nonfinite_place, reference),
        state=owner.state if owner else (),
    )


def summarize_runs(trace: Trace, reference: Trace, low: FloatFormat) -> Runs:
    """Both runs, row by row."""
    unholdable = first_unholdable(reference, low)
    return Runs(
        autocast=_summarize(trace, reference, low),
        fp32=_summarize(reference, trace, low),
        first_unholdable=unholdable.place if unholdable else None,
    )


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


def _would_be(nonfinite_place: NonfinitePlace, reference: Trace) -> float | None:
    """The largest magnitude that fp32 has in the same tensor."""
    call = nonfinite_place.seen_in or nonfinite_place.owner
    if call is None:
        return None
    same = next((other for other in reference.calls if other.key == call.key), None)
    if same is None:
        return None
    tensors: tuple[TensorStats, ...] = same.outputs if nonfinite_place.where == "output" else same.inputs
    return next((stats.absmax for stats in tensors if stats.path == nonfinite_place.value.path), None)


def tabulate(runs: Runs | None) -> list[dict[str, object]]:
    """One plain row per module call, both runs side by side, for a notebook or a spreadsheet."""
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
