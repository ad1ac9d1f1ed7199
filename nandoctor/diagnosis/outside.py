"""Diagnoses of what was non-finite before the step ran: weights, buffers, the batch, the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from nandoctor.causes.base import OutsideTensor
from nandoctor.causes.registry import find_cause
from nandoctor.diagnosis.origin import count_nonfinite
from nandoctor.evidence.optimizer import OptimizerSlot, OptimizerUpdate
from nandoctor.evidence.report import Diagnosis, NonfiniteElements, Origin
from nandoctor.evidence.trace import Place, TensorStats, Trace

OutsideKind = Literal["weight", "buffer", "input", "target"]
"""What a tensor from outside is: state of the model, or an array that the forward or only the loss reads."""


def diagnose_outside(
    kind: OutsideKind, name: str, stats: TensorStats, trace: Trace | None = None
) -> tuple[Diagnosis, ...]:
    """Diagnose a tensor that was non-finite from the start; nothing where it was not."""
    cause = find_cause(kind, OutsideTensor(name=name, stats=stats, low=trace.format if trace else None))
    if cause is None:
        return ()
    is_state = kind in ("weight", "buffer")
    origin = Origin(
        phase="state" if is_state else "input",
        place=_place_of(name.rpartition(".")[0] if is_state else "", trace),
        op=None,
        source=None,
        elements=count_nonfinite(stats, None if is_state else trace),
        would_be=None,
        inputs=(),
        output=stats,
        grid=stats.counts.grid if stats.counts else None,
    )
    return (Diagnosis(origin=origin, cause=cause),)


def diagnose_optimizer(slots: Sequence[OptimizerSlot], trace: Trace) -> Iterator[Diagnosis]:
    """Diagnose what the next step of the optimizer divides by zero; nothing where it does not."""
    for slot in slots:
        cause, counts = find_cause("optimizer", slot), slot.moment.counts
        if cause is not None and counts is not None:
            num_bad = (counts.num_zero, slot.moment.numel)
            origin = _in_optimizer("addcdiv", slot.parameter, num_bad, trace)
            yield Diagnosis(origin=replace(origin, inputs=(slot.moment,)), cause=cause)


def diagnose_update(update: OptimizerUpdate, trace: Trace) -> Diagnosis:
    """Diagnose an update that made non-finite weights of finite gradients, as far as the recorder saw it."""
    name, num_bad = next(iter(update.parameters.items()))
    op = f"{update.optimizer}.step" if update.optimizer else "update"
    origin = _in_optimizer(op, name, num_bad, trace)
    return Diagnosis(origin=origin, cause=find_cause("update", update))


def _in_optimizer(op: str, parameter: str, counts: tuple[int, int], trace: Trace) -> Origin:
    """Place the origin at the optimizer's op, with counts of a parameter's non-finite values and of all."""
    num_bad, numel = counts
    return Origin(
        phase="optimizer",
        place=_place_of(parameter.rpartition(".")[0], trace),
        op=op,
        source=None,
        # NaN where the gradient is zero, an infinity where it only squares to zero: no kind is known.
        elements=NonfiniteElements(kinds=(), num_bad=num_bad, numel=numel, first_index=None, samples=None),
        would_be=None,
        inputs=(),
        output=None,
    )


def _place_of(module: str, trace: Trace | None) -> Place:
    """A module by its path, as its first call shows it."""
    calls = trace.calls if trace is not None else ()
    return Place(module=module, type=next((call.type for call in calls if call.module == module), ""), call=0)
