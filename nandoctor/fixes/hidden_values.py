"""Doubts a step that made NaN or Inf which its output does not show, and diagnoses those that it leaves in buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from nandoctor.autocast.policy import REFERENCE
from nandoctor.causes.base import is_log_of_mask, writes_infinity
from nandoctor.diagnosis.conclusion import Findings, Gap, conclude
from nandoctor.diagnosis.origin import trace_back
from nandoctor.diagnosis.run_summary import outputs_differ
from nandoctor.diagnosis.verdict import judge, name_op
from nandoctor.engine.call import Batch
from nandoctor.engine.module_state import known_tensors
from nandoctor.engine.runner import CLOSELY, FailingStep, Watch
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.report import Reproduction
from nandoctor.evidence.trace import OpCall, TensorStats, Trace
from nandoctor.ops import COMPARISONS, MOVES, SEES_NAN, SELECTIONS, UNFILLED
from nandoctor.text import are, join_first
from nandoctor.torch_compat import tree_tensors
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, intercepting
from nandoctor.tracing.tensor_stats import all_finite, format_of, numbers_in, walk_tensors

_TAKEN = "taken."
_LEFT = frozenset({"", "item"})
"""In place of an op that took a value: none did, or it left torch as a number, and what became of it is not seen."""
_UNTRACED = Gap(
    text="The step is finite, but its operations could not be traced: a NaN that is hidden on the way would go unseen",
    remedy="Check what the forward computes on the way with torch.isfinite.",
)
_RESULTS = Watch(stage="closer look", statistics="none")
_PASS_THROUGH = MOVES | SELECTIONS | UNFILLED


def look_for_hidden(step: FailingStep, findings: Findings) -> Findings:
    """Return the findings of a step with a finite output, with a doubt if it does not show NaN or Inf that was made.

    Infinities and NaN written in the code are intended, and so are values that a selection leaves out.
    """
    if findings.ops and not _may_hide(findings.ops, findings.trace):
        return findings
    hidden = find_hidden(step, excused_by_fp32=True)
    return findings if hidden is None else replace(findings, gaps=(*findings.gaps, hidden))


def diagnose_buffers(step: FailingStep, findings: Findings) -> Findings:
    """Return the findings of a sound step, or those of NaN or Inf that it leaves in buffers for a later step."""
    names = findings.trace.spoilt_buffers
    with suppress(LossError, ModelError):  # a model may be called only once
        if not names or not _are_read_later(step, names):
            return findings
        shown = _returning(step, lambda batch: (step.call.forward(batch), _buffers(step, names)))
        trace, reference = shown.run(watch=CLOSELY).trace, shown.run(REFERENCE, CLOSELY).trace
        conclusion = conclude(trace, reference, step.low)
        verdict = judge(trace, reference, conclusion, Reproduction(grade="no-reference"))
        if verdict == "healthy":
            return findings
        named = join_first([f"`{name}`" for name in names], 3)
        note = f"What the step returns is finite; {named}, which it leaves for later steps, {are(len(names))} not."
        found = replace(findings, trace=trace, reference=reference, ops=trace.ops, verdict=verdict)
        return replace(found, conclusion=conclusion, exposed=shown, notes=(*findings.notes, note))
    return findings


def _buffers(step: FailingStep, names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for _, name, tensor in known_tensors(step.model, {}) if name in names}


def _are_read_later(step: FailingStep, names: Sequence[str]) -> bool:
    """Return True if a second forward, in training or in evaluation, gives another output with other numbers there."""

    def run_twice(training: bool, change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        def forward(batch: Batch) -> Any:
            step.call.forward(batch)
            for buffer in _buffers(step, names).values():
                buffer.data = change(buffer.detach())
            if not training:
                step.model.eval()
            return step.call.forward(batch)

        twice = replace(step, call=replace(step.call, forward=forward), loss=None)
        return [leaf for _, leaf in walk_tensors(twice.run(watch=_RESULTS).output)]

    for training in {step.mode.training, False}:
        as_left = run_twice(training, torch.Tensor.detach)
        others = (run_twice(training, partial(_filled, way=way)) for way in range(_WAYS))
        if not all(len(other) == len(as_left) and all(map(torch.equal, as_left, other)) for other in others):
            return True
    return False


def find_hidden(step: FailingStep, *, excused_by_fp32: bool) -> Gap | None:
    """Return the gap for the first NaN or Inf that a finite output does not show, and that nothing in the code intends.

    What gives fp32's output in this batch may not in another, so that this excuses no change.
    """
    exposed = _expose(step)
    with suppress(LossError, ModelError):  # a step that ran once may not run under the closer watch
        trace = exposed.run(watch=CLOSELY).trace
        if trace.blinded is not None or trace.raised is not None:  # the step ran while nobody watched its operations
            return _UNTRACED
        is_finite = all(stats.finite for stats in _results(trace))
        hidden = [*_list_hidden(trace)] if is_finite and _may_hide(trace.ops, trace) else []
        if not hidden or (_LEFT.isdisjoint(taker for _, taker in hidden) and _are_harmless(step)):
            return None
        reference = exposed.run(REFERENCE, CLOSELY).trace
        is_as_fp32 = excused_by_fp32 and not outputs_differ(_results(trace), _results(reference))
        found = (_find_unmeant(order, taker, trace, reference, is_as_fp32=is_as_fp32) for order, taker in hidden)
        if (what := next(filter(None, found), None)) is not None:
            return Gap(
                text=f"The output is finite, but {what} that it does not show. It may have decided what the output is, "
                "have left torch as a Python or numpy number, or be kept where the step does not read it.",
                remedy="Guard that operation, or give --call FILE.py:NAME, a function (model, batch) that returns "
                "what becomes of it.",
            )
    return None


def _may_hide(ops: Sequence[OpCall], trace: Trace) -> bool:
    """Return True if the batch is not finite, or an op of forward and loss made NaN or Inf, or took the model's NaN."""
    if not all(stats.finite for stats in trace.batch) or any(map(_spoilt_state, ops)):
        return True
    return any(
        "nan" in op.analysis.kinds or not _writes_mask(op, ops)
        for op in ops
        if op.analysis is not None and op.phase != "backward"
    )


def _spoilt_state(op: OpCall) -> str | None:
    """Return the weight or buffer that an op took with a NaN in it, which no code keeps there as a mark."""
    held = (
        (it.path, it.stats.counts) for it in op.inputs if it.origin in ("weight", "buffer") and it.stats is not None
    )
    return next((path for path, counts in held if counts is not None and counts.num_nan), None)


def _writes_mask(op: OpCall, ops: Sequence[OpCall]) -> bool:
    """Return True if an op makes infinities that its code asks for: it names one, or takes the logarithm of a mask."""
    return writes_infinity(op) or is_log_of_mask(op, ops)


def _results(trace: Trace) -> tuple[TensorStats, ...]:
    own = (stats for stats in trace.output if not stats.path.startswith(_TAKEN))
    return (*own, *filter(None, [trace.loss]))


def _list_hidden(trace: Trace) -> Iterator[tuple[int | None, str]]:
    """Yield the ops whose NaN or Inf an op hid, with its name, then those that no op took what they made of."""
    for stats in trace.output:
        taker = stats.path.removeprefix(_TAKEN).partition(".")[0] if stats.path.startswith(_TAKEN) else ""
        if taker and taker not in SEES_NAN:
            yield stats.producer, taker
    yield from ((order, "") for order in trace.handed_out if order not in {stats.producer for stats in trace.output})


def _find_unmeant(order: int | None, taker: str, trace: Trace, reference: Trace, *, is_as_fp32: bool) -> str | None:
    """Describe the op or the input that a hidden value is from, or return None if it is a mask, a marker or harmless.

    -inf that an op takes counts as a mask, unless it became NaN, as 0 times the log of 0 does. What fp32 has finite is
    harmless if the output is as fp32's, and it has not left torch as a number. What is in the batch is there to be left
    out by a comparison.
    """
    if order is None:
        named = (_spoilt_state(op) for op in trace.ops if op.op == taker)
        return next((f"`{name}` has NaN" for name in named if name is not None), None)
    found = trace_back(trace.ops, reference, [order], trace.format)
    has_nan = any("nan" in op.analysis.kinds for op in found.ops if op.analysis)
    for source in (*found.sources, *found.written):
        op, kinds = source.op, source.op.analysis.kinds if source.op.analysis else ()
        is_mask = not has_nan and (_writes_mask(op, trace.ops) or (bool(taker) and kinds == ("-inf",)))
        is_marker = any(math.isnan(value) for _, value in op.scalars)
        is_harmless = taker not in _LEFT and is_as_fp32 and source.reference_is_finite
        if kinds and not (is_mask or is_marker or is_harmless):
            made = "NaN" if "nan" in kinds else "Inf, and from it NaN," if has_nan else "Inf"
            return f"{name_op(op.op, op.source)} makes {made}"
    outside = next((tensor for _, tensor in found.outside if tensor.origin != "unknown"), None)
    if found.sources or outside is None or not taker or taker in COMPARISONS:
        return None
    return f"`{outside.path}` has NaN or Inf"


class _Exposed(NamedTuple):
    """The model's output, and the arguments of ops whose NaN or Inf was hidden, by the op's name and a number."""

    output: Any
    taken: dict[str, torch.Tensor]


_WAYS = 4
"""How many unlike numbers are put in place of a hidden value, to see whether the output depends on it."""


def _are_harmless(step: FailingStep) -> bool:
    """Return True if the step gives the same, whatever numbers stand where an op hides NaN or Inf.

    Code that refuses such a number by `raise` or `assert` may compute nothing from it.
    """
    runs = [_expose(step, way).run(watch=_RESULTS) for way in (None, *range(_WAYS))]
    ran = [run for run in runs if not run.refused]
    found = [[leaf for _, leaf in walk_tensors((run.output and run.output.output, run.loss))] for run in ran]
    is_same = (len(other) == len(found[0]) and all(map(torch.equal, found[0], other)) for other in found[1:])
    return all(is_same) and not any(run.trace.raised for run in ran)


def _filled(tensor: torch.Tensor, way: int) -> torch.Tensor:
    """Return the tensor with numbers that fp16 holds: any for NaN, large ones for infinities.

    No two non-finite elements get the same number, and each `way` gives the largest to another, so that the result
    changes if their order matters. In way 2 all NaN are large; in way 3 they are all 0 instead, which counts and
    booleans tell from any other number.
    """
    steps = torch.linspace(0, 1, tensor.numel(), device=tensor.device)
    steps = (steps.flip(0) if way == 1 else steps).view(tensor.shape)
    large, any_number = (3e4 + 3e4 * steps).to(tensor.dtype), (1.2e5 * steps - 6e4).to(tensor.dtype)
    finite = torch.where(torch.isinf(tensor), large.copysign(tensor), tensor)
    return torch.where(torch.isnan(tensor), {2: large, 3: torch.zeros_like(large)}.get(way, any_number), finite)


def _expose(step: FailingStep, way: int | None = None) -> FailingStep:
    """Return the step with an `_Exposed` as its output, of which its loss gets what it got before.

    With a `way`, an op that hides NaN or Inf is given other numbers in their place.
    """
    taken: dict[str, torch.Tensor] = {}

    def look(call: Invocation, proceed: Proceed) -> Any:
        made = proceed(call)
        for argument, tensor in call.tensors() if call.name not in _PASS_THROUGH else ():
            if _hides(call, tensor, made):
                taken[f"{call.name}.{len(taken)}"] = tensor
                made = made if way is None else proceed(call.with_argument(argument, _filled(tensor, way)))
        return made

    def forward(batch: Batch) -> _Exposed:
        taken.clear()
        with intercepting(look):
            return _Exposed(step.call.forward(batch), taken)

    return _returning(step, forward, look)


def _returning(step: FailingStep, forward: Callable[[Batch], Any], look: Any = None) -> FailingStep:
    """Return the step with another forward, of whose output the loss gets the first part; `look` sees its ops."""
    loss = step.loss

    def of_first(made: Any, batch: Batch) -> torch.Tensor:
        assert loss is not None
        with intercepting(look) if look is not None else nullcontext():
            return loss(made[0], batch)

    wrapped = loss and wraps(loss)(of_first)  # so that a run finds the loss's state
    return replace(step, call=replace(step.call, forward=forward), loss=wrapped)


def _hides(call: Invocation, taken: torch.Tensor, made: Any) -> bool:
    """Return True if the op made integers or booleans from a non-finite argument, or finite numbers from a NaN.

    `x != x` and `x == inf` ask for such values, and hide nothing.
    """
    leaves = tree_tensors(made)
    floats = [leaf for leaf in leaves if format_of(leaf.dtype) is not None]
    numbers = numbers_in(taken)
    if numbers is None or all_finite(taken):
        return False
    has_nan = bool(torch.isnan(numbers).any())
    if len(floats) < len(leaves) or not leaves:
        other = call.args[1] if len(call.args) > 1 else None
        is_infinite = call.name in COMPARISONS and isinstance(other, float) and math.isinf(other)
        return not (is_infinite and not has_nan) and not (call.name in ("eq", "ne") and call.args[0] is other)
    return all(map(all_finite, floats)) and has_nan
