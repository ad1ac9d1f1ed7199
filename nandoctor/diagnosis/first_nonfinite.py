"""Where a non-finite value first came to light."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nandoctor.diagnosis.batch_rows import as_samples
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import NonfiniteElements
from nandoctor.evidence.trace import ModuleCall, TensorStats, Trace

Where = Literal["output", "between", "batch", "loss"]
_TensorKey = tuple[str, int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfinitePlace:
    """The first non-finite tensor and the call that owns it.

    `where` as in `FirstNonfinite`: for a value made between modules, `owner` is the module whose forward made it and
    `seen_in` the call that received it. `owner` is None for the batch and for the loss.
    """

    where: Where
    owner: ModuleCall | None
    seen_in: ModuleCall | None
    value: TensorStats


def find_nonfinite_places(trace: Trace, reference: Trace) -> list[NonfinitePlace]:
    """The non-finite tensors of `trace` that can matter, in the order of execution; the loss comes last.

    Values of the same kinds at the same place in a reference whose output is finite are meant (attention masks) and
    passed over.
    """
    meant = (
        {_key(nonfinite_place): nonfinite_place.value for nonfinite_place in _nonfinite_places(reference)}
        if reference.finite
        else {}
    )
    return [
        nonfinite_place
        for nonfinite_place in _nonfinite_places(trace)
        if not _is_meant(nonfinite_place.value, meant.get(_key(nonfinite_place)))
    ]


def _is_meant(value: TensorStats, other: TensorStats | None) -> bool:
    """Tell whether the reference has the same kinds of value here; before exact counts any non-finite value counts."""
    if other is None or value.counts is None or other.counts is None:
        return other is not None
    return set(value.counts.kinds) <= set(other.counts.kinds)


def _nonfinite_places(trace: Trace) -> Iterator[NonfinitePlace]:
    for stats in trace.batch:
        if not stats.finite:
            yield NonfinitePlace(where="batch", owner=None, seen_in=None, value=stats)
    parents = _parents(trace)
    events = [(call.enter, call, call.inputs) for call in trace.calls]
    events += [(call.leave, call, call.outputs) for call in trace.calls if call.leave is not None]
    for tick, call, tensors in sorted(events, key=lambda event: event[0]):
        for stats in tensors:
            if stats.finite:
                continue
            if tick == call.leave:
                yield NonfinitePlace(where="output", owner=call, seen_in=None, value=stats)
            else:
                yield NonfinitePlace(where="between", owner=parents[call.key], seen_in=call, value=stats)
    if trace.loss is not None and not trace.loss.finite:
        yield NonfinitePlace(where="loss", owner=None, seen_in=None, value=trace.loss)


def _parents(trace: Trace) -> dict[tuple[str, int], ModuleCall | None]:
    parents: dict[tuple[str, int], ModuleCall | None] = {}
    ancestors: list[ModuleCall] = []
    for call in trace.calls:
        del ancestors[call.depth :]
        parents[call.key] = ancestors[-1] if ancestors else None
        ancestors.append(call)
    return parents


def _key(nonfinite_place: NonfinitePlace) -> _TensorKey:
    call = nonfinite_place.seen_in or nonfinite_place.owner
    module, number = call.key if call else ("", -1)
    return (module, number, nonfinite_place.where, nonfinite_place.value.path)


def count_nonfinite(stats: TensorStats, trace: Trace | None) -> NonfiniteElements:
    """What is non-finite in a tensor, as far as it was counted; without a trace its dimension 0 is not the batch's."""
    counts = stats.counts
    return NonfiniteElements(
        kinds=counts.kinds if counts else (),
        num_bad=counts.num_bad if counts else 0,
        numel=stats.numel,
        first_index=counts.first_bad_index if counts else None,
        samples=as_samples(trace, counts.samples, stats.shape, stats.producer) if counts and trace else None,
    )


def needs_counts(trace: Trace, low: FloatFormat) -> bool:
    """Tell whether anything in the trace asks for exact counts and has none."""
    tensors = (stats for call in trace.calls for stats in (*call.inputs, *call.outputs))
    return any(stats.counts is None and stats.asks_for_counts(low) for stats in tensors)
