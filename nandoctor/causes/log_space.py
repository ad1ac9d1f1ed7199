"""Logarithms and quotients after an op that can be written without the exponential or the probability before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nandoctor.causes.base import Candidate, Finding, ancestors, site_of
from nandoctor.evidence.edits import StableLog
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import CASTS, HAS_STABLE_LOGARITHM, MOVES, SUBTRACTIONS

_STEPS = 8
_KEEPS_SIGN = frozenset({"mul", "div", "reciprocal", "add", "sum", "mean", "cumsum", "prod", "sqrt"})
_SEEN_THROUGH = MOVES | CASTS | SUBTRACTIONS | _KEEPS_SIGN | {"neg"}
_LOGARITHMS = frozenset({"log", "log1p"})
_QUOTIENTS = frozenset({"div", "reciprocal"})


def stable_forms(finding: Finding) -> Iterator[Candidate]:
    """The first logarithm of what the op makes, or the op, in another form; then the first quotient."""
    before = (source for tensor in finding.op.inputs for source in _behind(finding, tensor))
    if not any(op.op in HAS_STABLE_LOGARITHM for op in (finding.op, *before)):
        return
    after = [finding.op, *_descendants(finding.ops, finding.op)]
    for names in (_LOGARITHMS, _QUOTIENTS):
        for op in (op for op in after if op.op in names and op.inputs):
            taken = op.inputs[-1] if op.op == "div" else op.inputs[0]
            if any(source.op in HAS_STABLE_LOGARITHM for source in _behind(finding, taken)):
                site = site_of(op)
                everywhere = (StableLog(site=site, everywhere=True),) if names is _LOGARITHMS else ()
                yield (StableLog(site=site), *everywhere)
                break


def _behind(finding: Finding, tensor: OpTensor) -> Iterator[OpCall]:
    return ancestors(finding.ops, tensor, _STEPS, through=_SEEN_THROUGH)


def _descendants(ops: Mapping[int, OpCall], op: OpCall) -> Iterator[OpCall]:
    """The ops that take what an op made, in order, those that take what these made, and so on, a few steps deep."""
    depth = {op.order: 0}
    for order in sorted(order for order in ops if order > op.order):
        steps = [depth[tensor.producer] for tensor in ops[order].inputs if tensor.producer in depth]
        if steps and min(steps) < _STEPS:
            depth[order] = min(steps) + 1
            yield ops[order]
