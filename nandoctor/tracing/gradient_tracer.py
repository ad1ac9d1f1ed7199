"""Watches the backward pass: which forward op each gradient belongs to, and where a gradient stops being finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nandoctor.evidence.trace import OpAnalysis, OpCall, OpTensor, SourceLine
from nandoctor.ops import BACKWARD_HOOK, GRADIENT_SUM
from nandoctor.torch_compat import is_custom_node, plain_torch
from nandoctor.tracing.exact_counts import count_exactly, find_largest, find_nonfinite
from nandoctor.tracing.module_tracer import Owner
from nandoctor.tracing.op_analysis import describe_operand
from nandoctor.tracing.tensor_stats import (
    Reading,
    all_finite,
    collect_all,
    format_of,
    is_finite,
    limits_of,
    measure,
    numbers_in,
)

if TYPE_CHECKING:
    from nandoctor.engine.function_tracer import FunctionTracer

Gradients = tuple[torch.Tensor | None, ...]


class _Claim(NamedTuple):
    """The owner of a graph node: its forward op's order (None for a custom Function), name and module call."""

    forward: int | None
    op: str
    owner: Owner
    source: SourceLine | None = None


@dataclass(slots=True, kw_only=True)
class _RecordedNode:
    claim: _Claim
    incoming: list[Reading]
    outgoing: list[Reading]
    analysis: OpAnalysis | None


class GradientTracer:
    """A recorder of what passes through the graph nodes of traced ops in the backward pass.

    The node of a custom autograd Function is named after its class. It belongs to `owner_inside`, the module call of
    the last op that ran without a graph: that op was in the Function's forward. `functions` records its backward.
    Autograd adds up the gradients of a tensor that several ops use; a sum that overflows is recorded as an op.
    """

    def __init__(self, functions: FunctionTracer) -> None:
        self._functions = functions
        self.owner_inside: Owner = ("", "", 0)
        self._claims: dict[Any, _Claim] = {}
        self._summands: dict[tuple[Any, int], list[Reading]] = {}  # by node, and by the output that they belong to
        self._recordings: list[_RecordedNode] = []
        self._handles = ExitStack()

    def claim(self, outputs: Sequence[torch.Tensor], forward: int, op: str, owner: Owner) -> None:
        """Assign the nodes between these outputs and those claimed before to one forward op, and hook them."""
        waiting: list[Any] = [output.grad_fn for output in outputs]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._claims:
                continue
            is_custom = is_custom_node(node)
            self._claims[node] = self._claim_function(node) if is_custom else _Claim(forward, op, owner)
            self._handles.callback(node.register_prehook(partial(self._record_sums, node)).remove)
            if node.name() != "torch::autograd::AccumulateGrad":  # that one adds to `.grad` and makes nothing
                self._handles.callback(node.register_hook(partial(self._record, node)).remove)
            waiting += [following for following, _ in node.next_functions]

    def _claim_function(self, node: Any) -> _Claim:
        name = type(node).__name__.removesuffix("Backward")
        if name == "BackwardHookFunction":  # of torch.utils.hooks: its backward passes gradients through
            return _Claim(None, BACKWARD_HOOK, self.owner_inside)
        source = self._functions.line_of(node)
        self._handles.callback(self._functions.watch(node, self.owner_inside))
        return _Claim(None, name, self.owner_inside, source)

    def close(self) -> None:
        """Remove all hooks."""
        self._handles.close()

    def calls(self, forward: Sequence[OpCall]) -> tuple[OpCall, ...]:
        """Return the records of the backward pass; `forward` holds the traced ops that the nodes were claimed for."""
        counts: Counter[_Claim] = Counter()
        calls = []
        readings = (group for recording in self._recordings for group in (recording.incoming, recording.outgoing))
        stats = iter(collect_all([[("", reading) for reading in group] for group in readings]))
        for order, (recording, incoming, outgoing) in enumerate(zip(self._recordings, stats, stats, strict=True)):
            claim = recording.claim
            origin = None if claim.forward is None else forward[claim.forward]
            module, type_name, call = (origin.module, origin.type, origin.call) if origin else claim.owner
            calls.append(
                OpCall(
                    op=claim.op,
                    order=order,
                    module=module,
                    type=type_name,
                    call=call,
                    nth=origin.nth if origin else counts[claim],
                    phase="backward",
                    source=origin.source if origin else claim.source,
                    inside=origin.inside if origin else None,
                    called_from=origin.called_from if origin else None,
                    inputs=tuple(OpTensor(name="grad_output", stats=taken) for taken in incoming),
                    outputs=outgoing,
                    scalars=origin.scalars if origin else (),
                    analysis=recording.analysis,
                    forward=claim.forward,
                )
            )
            counts[claim] += 1
        return tuple(calls)

    def _record(self, node: Any, outgoing: Gradients, incoming: Gradients) -> None:
        with plain_torch():
            given = [gradient for gradient in incoming if gradient is not None]
            made = [gradient for gradient in outgoing if gradient is not None]
            before = [read for gradient in given if (read := measure(gradient))]
            after = []
            for edge, gradient in zip(node.next_functions, outgoing, strict=False):
                if gradient is not None and (read := measure(gradient)):
                    after.append(read)
                    self._summands.setdefault(edge, []).append(read)
            made_here = all(map(is_finite, before)) and not all(map(is_finite, after))
            analysis = self._examine(given, made) if made_here else None
        claim = self._claims[node]
        self._recordings.append(_RecordedNode(claim=claim, incoming=before, outgoing=after, analysis=analysis))

    def _record_sums(self, node: Any, incoming: Gradients) -> None:
        """Record an incoming gradient as an op if it is a sum that overflows.

        A user's hook may have changed it, so the summands must be finite, and add up to more than the format holds.
        """
        for index, gradient in enumerate(incoming):
            summands = self._summands.pop((node, index), [])
            if gradient is None or len(summands) < 2 or not all(map(is_finite, summands)):
                continue
            with plain_torch():
                low, largest = format_of(gradient.dtype), sum(max(map(abs, limits_of(part))) for part in summands)
                total = measure(gradient) if low is not None and largest > low.max else None
                if total is None or is_finite(total):
                    continue
                analysis = self._examine([], [gradient])
            claim = self._claims[node]._replace(op=GRADIENT_SUM)
            self._recordings.append(_RecordedNode(claim=claim, incoming=summands, outgoing=[total], analysis=analysis))

    def _examine(self, incoming: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor]) -> OpAnalysis:
        nonfinite = next(
            values for values in map(numbers_in, outgoing) if values is not None and not all_finite(values)
        )
        counts, _ = count_exactly(nonfinite, place=True)
        given = [values for values in map(numbers_in, incoming) if values is not None]
        # A derivative that is infinite by itself says more than one that is multiplied by a zero gradient.
        places = (find_nonfinite(nonfinite) & (values != 0) for values in given if values.shape == nonfinite.shape)
        open_places = (find_largest(place.numpy(force=True)) for place in places if bool(place.any()))
        worst = next(open_places, counts.first_bad_index)
        taken = (describe_operand("grad_output", values, worst, nonfinite) for values in given)
        return OpAnalysis(counts=counts, numel=nonfinite.numel(), operands=tuple(taken))
