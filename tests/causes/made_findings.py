"""Findings made by hand: one op that made something non-finite, its analysis, and the ops before it."""

import dataclasses
import math

from made_traces import reference, stats

from nandoctor.causes.base import Finding, GradientFinding
from nandoctor.evidence.formats import FP16, FP32
from nandoctor.evidence.trace import OpAnalysis, OpCall, Operand, OpTensor, Place

NAN, INF = math.nan, math.inf


class Recipe:
    """Ops in their order, each with the numbers that matter; `finding()` blames the last."""

    def __init__(self):
        self.ops = []

    def op(self, name, *inputs, made=(1.0,), dtype=FP16, source="op", **scalars):
        """Add an op that takes earlier ones (by order) or values from outside, and return its order."""
        order = len(self.ops)
        call = OpCall(
            op=name,
            order=order,
            place=Place(module="block", type="Block", call=0),
            nth=order,
            phase="forward",
            source=None,
            inputs=tuple(self._tensor(i, taken, source) for i, taken in enumerate(inputs)),
            outputs=(dataclasses.replace(stats(*made), dtype=dtype),),
            scalars=tuple(scalars.items()),
        )
        self.ops.append(call)
        return order

    def _tensor(self, position, taken, source):
        name = ("self", "other", "third")[position]
        if isinstance(taken, int):
            return OpTensor(name=name, stats=self.ops[taken].outputs[0], producer=taken, origin="op")
        return OpTensor(name=name, stats=stats(*taken), origin=source)

    def finding(self, *, exact=None, reference_is_finite=True, length=None, full_rows=None):
        """The last op as a finding; `exact` is the finite value that float64 has at its worst element."""
        last = self.ops[-1]
        analysis = OpAnalysis(
            counts=last.outputs[0].counts,
            numel=last.outputs[0].numel,
            exact=exact,
            length=length,
            num_full_rows=full_rows,
            operands=tuple(_operand(tensor, last.outputs[0].dtype) for tensor in last.inputs),
        )
        op = dataclasses.replace(last, analysis=analysis)
        reference_op = dataclasses.replace(last, outputs=(stats(1.0 if reference_is_finite else NAN),))
        return Finding(op=op, ops=self.ops, low=FP16, reference=reference(ops=(reference_op,)))


def _operand(tensor, dtype):
    numbers = tensor.stats
    return Operand(
        name=tensor.name,
        dtype=dtype,
        shape=numbers.shape,
        absmax=numbers.absmax,
        min=numbers.min,
        max=numbers.max,
        counts=numbers.counts,
        at_worst=numbers.absmax if numbers.finite else None,
    )


def gradient_finding(recipe, forward, *, incoming, outgoing, reference_is_finite=False):
    """A backward op of the op `forward` of a recipe, with the gradients that came in and went out."""
    made, given = stats(*outgoing), stats(*incoming)
    analysis = OpAnalysis(
        counts=made.counts,
        numel=made.numel,
        operands=(_operand(OpTensor(name="grad_output", stats=given), FP32),),
    )
    op = dataclasses.replace(recipe.ops[forward], phase="backward", analysis=analysis, forward=forward)
    return GradientFinding(
        op=op,
        forward=recipe.ops[forward],
        ops=recipe.ops,
        low=FP16,
        reference=reference(bad_gradients=() if reference_is_finite else (made,)),
    )
