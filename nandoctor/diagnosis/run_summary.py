"""What the traces say, in the words of the report.

In: aligned traces and the first sighting. Out: the report's `first_nonfinite` and `runs`.
"""

from __future__ import annotations

from typing import Literal

from nandoctor.diagnosis.first_nonfinite import Sighting
from nandoctor.diagnosis.layer_comparison import align, first_unholdable
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import FirstNonfinite, Runs, RunSummary
from nandoctor.evidence.trace import LOSS, TensorStats, Trace

_PHASES: dict[str, Literal["loss", "input"]] = {"batch": "input", "loss": "loss"}


def describe_first(sighting: Sighting, trace: Trace, reference: Trace) -> FirstNonfinite:
    """The first sighting as the report keeps it, with what fp32 has at the same place."""
    owner, seen_in = sighting.owner, sighting.seen_in
    census = sighting.value.census
    assert census is not None
    return FirstNonfinite(
        run="autocast",
        phase=_PHASES.get(sighting.where, "forward"),
        module=owner.module if owner else LOSS if sighting.where == "loss" else "",
        type=owner.type if owner else "",
        call=owner.call if owner else 0,
        where=sighting.where,
        seen_in=seen_in.label if seen_in else None,
        kinds=census.kinds,
        num_bad=census.num_bad,
        numel=sighting.value.numel,
        first_index=census.first_bad_index,
        samples=census.samples,
        inputs=owner.inputs if owner else (),
        value=sighting.value,
        would_be=_would_be(sighting, reference),
        state=owner.state if owner else (),
    )


def summarize_runs(trace: Trace, reference: Trace, low: FloatFormat) -> Runs:
    """Both runs, row by row."""
    unholdable = first_unholdable(reference, low)
    return Runs(
        autocast=_summarize(trace, reference, low),
        fp32=_summarize(reference, trace, low),
        first_unholdable=unholdable.label if unholdable else None,
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


def _would_be(sighting: Sighting, reference: Trace) -> float | None:
    """The largest magnitude that fp32 has in the same tensor."""
    call = sighting.seen_in or sighting.owner
    if call is None:
        return None
    same = next((other for other in reference.calls if other.key == call.key), None)
    if same is None:
        return None
    tensors: tuple[TensorStats, ...] = same.outputs if sighting.where == "output" else same.inputs
    return next((stats.absmax for stats in tensors if stats.path == sighting.value.path), None)


def tabulate(runs: Runs | None) -> list[dict[str, object]]:
    """One plain row per module call, both runs side by side, for a notebook or a spreadsheet."""
    if runs is None:
        return []
    references = {(row.module, row.call): row for row in runs.fp32.modules}
    return [
        {
            "module": row.module,
            "type": row.type,
            "call": row.call,
            "finite": row.finite,
            "absmax": row.absmax,
            "fp32_absmax": other.absmax if other else None,
            "fp32_finite": other.finite if other else None,
            "rel_err": row.rel_err,
            "headroom_bits": row.headroom_bits,
            "num_bad": sum(stats.census.num_bad for stats in row.outputs if stats.census is not None),
        }
        for row in runs.autocast.modules
        for other in [references.get((row.module, row.call))]
    ]
