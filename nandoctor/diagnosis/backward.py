"""Traces non-finite gradients to the backward ops that made them from finite ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nandoctor.causes.base import Finding, GradientFinding, is_log_of_mask, writes_infinity
from nandoctor.causes.registry import find_cause
from nandoctor.changes.places import singular_inputs
from nandoctor.diagnosis.conclusion import (
    Conclusion,
    Suspect,
    absurd_weights,
    as_gradient,
    broken_outside,
    diagnose_op,
    origin_at,
    origin_taken,
    suspect,
    told_once,
)
from nandoctor.diagnosis.origin import BackwardOps, by_forward, find_removal, findings_of, trace_back
from nandoctor.evidence.formats import FP32, FloatFormat
from nandoctor.evidence.report import Cause, Diagnosis
from nandoctor.evidence.trace import NonfiniteCounts, OpCall, Trace
from nandoctor.ops import EXPONENTIALS
from nandoctor.text import code, join_first

_DISCARDED = "where-gradient-trap"
_ALWAYS_OVERFLOW = EXPONENTIALS - {"pow"}
"""An Inf from these is an overflow even if float64 cannot hold the value either; 0 to the power of -1 is not one."""


def conclude_backward(
    trace: Trace, reference: Trace, low: FloatFormat, excess_scale: float | None = None
) -> Conclusion:
    """Diagnose where gradients stop being finite, in the order of the backward pass; fp32's failure comes first.

    `excess_scale` is the loss scale if all gradients are finite without it.
    """
    found = _conclude_run(trace, reference, low, excess_scale)
    if reference is trace or not reference.bad_gradients:
        return found
    in_fp32 = _conclude_run(reference, reference, FP32, None)
    return replace(in_fp32, in_fp32=True).followed_by(found) if in_fp32.diagnoses else found


def _conclude_run(trace: Trace, reference: Trace, low: FloatFormat, excess_scale: float | None) -> Conclusion:
    found: list[tuple[Diagnosis, Suspect | None]] = []
    made = [op for op in trace.backward if op.analysis is not None]
    of_forward = by_forward(trace.backward)
    passed_on = [op for op in made if not _is_removed(op, trace.ops, of_forward)] or made
    for taken in findings_of(passed_on, trace.ops, reference, low):
        removal, selects = find_removal(taken.op, trace.ops, of_forward)
        finding = as_gradient(taken, removal if selects else None, excess_scale)
        found.append(_diagnose(finding, trace, is_absorbed=removal is not None))
    return Conclusion(
        # Several backward ops may meet what one forward op made.
        diagnoses=told_once(diagnosis for diagnosis, _ in found) or _first_taker(trace),
        suspects=tuple(dict.fromkeys(blamed for _, blamed in found if blamed is not None)),
    )


def _is_removed(op: OpCall, ops: Sequence[OpCall], of_forward: BackwardOps) -> bool:
    """Return True if every path from a backward op to a weight passes an op whose outgoing gradients are finite.

    The backward of relu, clamp and where replaces gradients by zeros for elements that they did not pass on.
    `of_forward` has the backward ops by the order of their forward op.
    """
    seen, open_ops = {op.order}, [op]
    while open_ops:
        forward = open_ops.pop().forward
        if forward is None:
            return False
        for tensor in ops[forward].inputs:
            if tensor.stats is None or tensor.origin in ("batch", "buffer"):
                continue
            after = of_forward.get(tensor.producer, []) if tensor.producer is not None else []
            if not after:
                return False  # a weight, or a tensor that cannot be followed
            passing = [other for other in after if not other.outputs_finite and other.order not in seen]
            seen.update(other.order for other in passing)
            open_ops += passing
    return True


def _diagnose(finding: GradientFinding, trace: Trace, *, is_absorbed: bool) -> tuple[Diagnosis, Suspect | None]:
    """Diagnose an op inside a custom backward, else an Inf that the forward hid, else the forward op itself."""
    op = finding.op
    inside = _find_inside(finding, trace) if finding.forward is None else None
    if inside is not None:
        kept = _find_kept(inside, finding)
        cause = find_cause("forward", kept or inside)
        if kept is not None and cause is not None:
            told = f"The backward of {op.op}, for which the forward kept that Inf, makes it NaN."
            return diagnose_op(kept, _followed(cause, f"the backward of {op.op} turns that Inf into NaN", told), trace)
        origin = replace(origin_at(inside, trace), function=op.op)
        return Diagnosis(origin=origin, cause=cause), suspect(inside, cause)
    by_arithmetic = is_absorbed and finding.discarded_by is None
    hidden, broken = _hidden_origin(finding, trace, with_own=by_arithmetic)
    if broken is not None:
        return broken, None
    if hidden is not None and (explained := _explain_hidden(finding, hidden)) is not None:
        blamed = replace(finding, forward=hidden.op) if explained.code == _DISCARDED else hidden
        return Diagnosis(origin=origin_at(hidden, trace), cause=explained), suspect(blamed, explained)
    return diagnose_op(finding, find_cause("backward", finding), trace)


def _followed(cause: Cause, headline: str, explanation: str) -> Cause:
    """Return the cause with what the backward pass made of its value, in headline and explanation."""
    told = cause.headline and f"{cause.headline}; {headline}"
    return replace(cause, headline=told, explanation=f"{cause.explanation} {explanation}")


def _find_inside(finding: GradientFinding, trace: Trace) -> Finding | None:
    """Return the op in a custom Function's backward that made the non-finite values, or None if it got them."""
    ran = [op for op in trace.function_ops if op.place == finding.op.place]
    symptoms = [op.order for op in ran if not op.outputs_finite]
    if not symptoms:
        return None
    # The output of this run is the gradients.
    reference = finding.reference
    inner = replace(reference, ops=reference.function_ops, output=reference.bad_gradients, loss=None)
    found = trace_back(trace.function_ops, inner, symptoms[-1:], finding.low)
    return next((source for source in (*found.sources, *found.written) if source.op.analysis is not None), None)


def _find_kept(inside: Finding, finding: GradientFinding) -> Finding | None:
    """Return the forward op that overflowed to the Infs that a custom backward makes NaN from, or None.

    It is recognised by as many Infs at the same places.
    """
    if not inside.had_inf_input or not inside.reference_is_finite:
        return None
    taken = [tensor.stats for tensor in inside.op.nonfinite_inputs if tensor.stats is not None]
    kept = {_places(stats.numel, stats.counts) for stats in taken if stats.counts is not None}
    overflows = (op for op in finding.ops if op.analysis is not None and op.analysis.exact is not None)
    found = findings_of(overflows, finding.ops, finding.reference, finding.low)
    finite = (it for it in found if it.reference_is_finite)
    return next((it for it in finite if _places(it.analysis.numel, it.analysis.counts) in kept), None)


def _places(numel: int, counts: NonfiniteCounts) -> object:
    return numel, counts.num_posinf, counts.num_neginf, counts.first_bad_index, counts.samples


UNSCALED = "Gradients are those of the unscaled loss: pass --loss-scale if GradScaler multiplied it."
"""A note for fp16 without a known loss scale: gradients that are finite without it may exceed 65504 with it."""


def describe_outside(names: Sequence[str]) -> Iterator[str]:
    """Yield what the backward pass also gave gradients, which the model does not hold, and the file need not."""
    if names:
        named = join_first([code(name) for name in names], 3)
        yield f"Trained outside of the model, with the values that your code gives it here: {named}."


def _hidden_origin(
    finding: GradientFinding, trace: Trace, *, with_own: bool
) -> tuple[Finding | None, Diagnosis | None]:
    """Return the op that made the forward op's infinite input, or the forward op if a later op hides what it made.

    A forward op that is singular at finite inputs is left to the causes of the backward pass, unless `with_own`: its
    Inf became an ordinary number by arithmetic. If a broken weight or buffer is behind it, that is diagnosed too.
    """
    forward = finding.forward
    if forward is None:
        return None, None
    met = [*forward.outputs, *(tensor.stats for tensor in forward.inputs)]
    if all(stats is None or stats.finite for stats in met):
        return None, None
    found = trace_back(trace.ops, finding.reference, [forward.order], finding.low)
    findings = [source for source in (*found.sources, *found.written) if source.op.analysis]
    overflowed = [it for it in findings if it.overflowed or it.op.op in _ALWAYS_OVERFLOW]
    own = [it for it in findings if with_own or it.op != forward or it.had_inf_input]
    computed = [it for it in own if not (writes_infinity(it.op) or is_log_of_mask(it.op, trace.ops))]
    # Ops that only turned infinities into NaN come last.
    hidden = next(iter((*overflowed, *sorted(computed, key=lambda it: it.had_inf_input))), None)
    # What a selection removes after the op may be meant to be infinite in the batch; what saturates is not.
    is_removed = finding.discarded_by is not None and not forward.outputs_finite
    origins = {"weight", "buffer", *(() if is_removed else ("batch",))}
    broken = [*broken_outside(found, trace, origins), *(absurd_weights(hidden, trace) if hidden is not None else ())]
    if hidden is not None and hidden.op.forward is not None:  # it computes a derivative
        hidden = as_gradient(hidden, None)
    return hidden, next(iter(broken), None)


def _explain_hidden(finding: GradientFinding, hidden: Finding) -> Cause | None:
    """Explain a NaN of a function that a selection discards; else what made the value, whatever hides it."""
    op = finding.op
    is_undefined = hidden.analysis.kinds == ("nan",) and bool(singular_inputs(hidden.op))  # not a fully masked softmax
    trap = find_cause("backward", replace(finding, forward=hidden.op)) if is_undefined else None
    cause = find_cause("backward" if isinstance(hidden, GradientFinding) else "forward", hidden)
    if cause is None or (trap is not None and trap.code == _DISCARDED):
        return trap
    what = "NaN" if hidden.analysis.kinds == ("nan",) else "Inf"
    told = f"A later op hides that {what}; the backward of {op.op} multiplies it by 0: NaN."
    return _followed(cause, f"the backward of {op.op} multiplies that {what} by 0, which is NaN", told)


def _first_taker(trace: Trace) -> tuple[Diagnosis, ...]:
    """Diagnose the op that first gets a non-finite gradient that no op made, as if a user's hook made it."""
    hits = ((op, tensor) for op in trace.backward for tensor in op.nonfinite_inputs)
    return tuple(Diagnosis(origin=origin_taken(op, tensor), cause=None) for op, tensor in hits)[:1]
