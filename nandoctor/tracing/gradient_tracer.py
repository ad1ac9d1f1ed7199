"""Watches the backward pass: which forward op each gradient belongs to, and where a gradient stops being finite."""

from __future__ import annotations

import inspect
import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from nandoctor.evidence.trace import OpAnalysis, OpCall, OpTensor, Place, SourceLine
from nandoctor.ops import BACKWARD_HOOK
from nandoctor.torch_compat import function_backward, is_custom_node, plain_torch, replace_function_backward
from nandoctor.tracing.module_tracer import NOWHERE
from nandoctor.tracing.op_tracer import Input, Known, OpTracer, Recording, collect_calls, describe_operand
from nandoctor.tracing.tensor_stats import (
    all_finite,
    count_exactly,
    find_largest,
    find_nonfinite,
    is_finite,
    measure,
    numbers_in,
)

Gradients = tuple[torch.Tensor | None, ...]


class GradientTracer:
    """A recorder of what passes through the graph nodes of traced ops in the backward pass.

    The node of a custom autograd Function is named after its class. It belongs to `owner_inside`, the module call of
    the last op that ran without a graph: that op was in the Function's forward. `ops` records what its backward runs;
    `known` is as for that tracer.
    """

    def __init__(self, known: Iterable[Known]) -> None:
        self.ops = OpTracer(known=known, phase="backward")
        self.owner_inside = NOWHERE
        self._claims: dict[Any, OpCall] = {}  # what each node runs
        self._num_claimed: Counter[tuple[Place, str]] = Counter()  # of custom Functions
        self._recordings: list[Recording] = []
        self._handles = ExitStack()

    def claim(self, outputs: Sequence[torch.Tensor], op: OpCall) -> None:
        """Assign the nodes between these outputs and those claimed before to one forward op, and hook them."""
        derivative = replace(op, phase="backward", forward=op.order, analysis=None)
        waiting: list[Any] = [output.grad_fn for output in outputs]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._claims:
                continue
            self._claims[node] = self._claim_function(node) if is_custom_node(node) else derivative
            if node.name() != "torch::autograd::AccumulateGrad":  # that one adds to `.grad` and makes nothing
                self._handles.callback(node.register_hook(partial(self._record, node)).remove)
            waiting += [following for following, _ in node.next_functions]

    def _claim_function(self, node: Any) -> OpCall:
        name, source = type(node).__name__.removesuffix("Backward"), None
        if name == "BackwardHookFunction":  # of torch.utils.hooks: its backward passes gradients through
            name = BACKWARD_HOOK
        else:
            source = _line_of_backward(node)
            self._handles.callback(replace_function_backward(node, partial(self._watched, self.owner_inside)))
        owner = self.owner_inside
        nth = self._num_claimed[owner, name]
        self._num_claimed[owner, name] += 1
        return OpCall(op=name, order=0, place=owner, nth=nth, phase="backward", source=source)

    def _watched(self, owner: Place, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hand-written backward whose ops are recorded as `owner`'s."""

        @wraps(backward)
        def run(*args: Any) -> Any:
            with self.ops.watching(lambda: owner):
                return backward(*args)

        return run

    def close(self) -> None:
        """Remove all hooks."""
        self._handles.close()

    def calls(self) -> tuple[OpCall, ...]:
        """Return the records of the backward pass."""
        return collect_calls(self._recordings)

    def _record(self, node: Any, outgoing: Gradients, incoming: Gradients) -> None:
        with plain_torch():
            given = [gradient for gradient in incoming if gradient is not None]
            made = [gradient for gradient in outgoing if gradient is not None]
            before = [read for gradient in given if (read := measure(gradient))]
            after = [read for gradient in made if (read := measure(gradient))]
            made_here = all(map(is_finite, before)) and not all(map(is_finite, after))
            analysis = self._examine(given, made) if made_here else None
        taken: list[Input] = [(OpTensor(name="", stats=None), reading) for reading in before]
        recorded = replace(self._claims[node], order=len(self._recordings), analysis=analysis)
        self._recordings.append(Recording(recorded, taken, after))

    def _examine(self, incoming: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor]) -> OpAnalysis:
        made = (values for values in map(numbers_in, outgoing) if values is not None)
        nonfinite = next(values for values in made if not all_finite(values))
        counts, _ = count_exactly(nonfinite)
        given = [values for values in map(numbers_in, incoming) if values is not None]
        # A derivative that is infinite by itself says more than one that is multiplied by a zero gradient.
        places = (find_nonfinite(nonfinite) & (values != 0) for values in given if values.shape == nonfinite.shape)
        open_places = (find_largest(place.numpy(force=True)) for place in places if bool(place.any()))
        worst = next(open_places, counts.first_bad_index)
        taken = (describe_operand("grad_output", values, worst, nonfinite) for values in given)
        return OpAnalysis(counts=counts, numel=nonfinite.numel(), operands=tuple(taken))


def _line_of_backward(node: Any) -> SourceLine | None:
    """Return the line of the `def backward`, below its decorators; None if it was not written in Python."""
    code = getattr(inspect.unwrap(function_backward(node)), "__code__", None)
    if code is None:
        return None
    lines = linecache.getlines(code.co_filename)
    numbered = enumerate(lines[code.co_firstlineno - 1 :], start=code.co_firstlineno)
    line, text = next(((n, t) for n, t in numbered if t.lstrip().startswith("def ")), (code.co_firstlineno, ""))
    return SourceLine(file=code.co_filename, line=line, text=text.strip())
