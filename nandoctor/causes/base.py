"""The findings that causes decide on, and the checks that several causes share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from nandoctor.changes.places import maker_of, singular_inputs, site_of
from nandoctor.evidence.dump_summary import OptimizerUpdate
from nandoctor.evidence.edits import Edit, OpSite
from nandoctor.evidence.formats import FP32, FloatFormat
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import OpAnalysis, OpCall, Operand, OpTensor, TensorStats, Trace, largest_of
from nandoctor.ops import CASTS, DIVISIONS, DOMAINS, FILLS, MOVES, POINTWISE, PRODUCTS, UNFILLED
from nandoctor.text import nonfinite_part, number

_DEPTH = 16

CausePhase = Literal[
    "forward", "backward", "swallowed", "constant", "weight", "buffer", "input", "target", "optimizer", "update"
]
"""What a cause gets: an op of the forward pass or the loss, an op of the backward pass, or an op whose infinity a later
op swallowed; a tensor that the code made from numbers, or one of the model, the batch or the optimizer's state; or an
optimizer's update."""

Candidate = tuple[Edit, ...]
"""One change in several strengths; the first that passes is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An op of the forward pass or the loss that made non-finite values, with its run.

    `ops` are all ops of the run, `reference` is the fp32 run. `low` is the format that autocast computes products in.
    """

    op: OpCall
    ops: Sequence[OpCall]
    low: FloatFormat
    reference: Trace

    @property
    def analysis(self) -> OpAnalysis:
        """The op's analysis, which it has if it made non-finite values."""
        assert self.op.analysis is not None
        return self.op.analysis

    @property
    def reference_op(self) -> OpCall | None:
        """The same op of the fp32 run, or None if that run took another path."""
        return self.reference.by_key.get(self.op.key)

    @property
    def had_inf_input(self) -> bool:
        """True if the op got infinities, unless its non-finite values came from finite elements beside them."""
        operands = self.op.analysis.operands if self.op.analysis is not None and self.op.op in POINTWISE else ()
        of_finite = bool(operands) and all(taken.at_worst is not None for taken in operands)
        return bool(self.op.carried_inputs) and not of_finite

    @property
    def format(self) -> FloatFormat:
        """The format that the values had to fit: the output's, or `low` if vmap adds a bias in fp32 to a product."""
        made, exact = self.op.outputs[0].dtype, self.analysis.exact
        is_summed = self.op.op in PRODUCTS and made is FP32 and exact is not None and made.holds(exact)
        return self.low if is_summed else made

    @property
    def overflowed(self) -> bool:
        """True if unlimited range would have kept non-finite elements finite, and not most have a divisor of 0."""
        divisors = {tensor.name for tensor in singular_inputs(self.op)} if self.op.op in DIVISIONS else set()
        zeros = sum(taken.counts.num_zero for taken in self.analysis.operands if taken.name in divisors)
        return self.analysis.exact is not None and 2 * zeros <= self.analysis.num_bad

    @property
    def is_past_float64(self) -> bool:
        """True if finite operands gave infinities and no NaN, as a sum or product past float64's limit does."""
        return not self.had_inf_input and "nan" not in self.analysis.kinds

    @property
    def reference_is_finite(self) -> bool:
        """True if the same op of the fp32 run is finite."""
        return self.reference_op is not None and self.reference_op.outputs_finite

    def operand(self, name: str) -> Operand | None:
        """Return the analysed input of this name, or None."""
        return next((operand for operand in self.analysis.operands if operand.name == name), None)

    def sources(self, tensor: OpTensor) -> Iterator[OpCall]:
        """Yield the op that made `tensor`; if that only moves or casts values, also the op before it, and so on."""
        while (op := maker_of(tensor, self.ops)) is not None:
            yield op
            if op.op not in MOVES | CASTS or not op.inputs:
                return
            # Of several that are moved, as to one shape, it is the one with the same smallest and largest value.
            limits = tensor.stats and (tensor.stats.min, tensor.stats.max)
            moved = (it for it in op.inputs if limits and it.stats and (it.stats.min, it.stats.max) == limits)
            tensor = next(moved, op.inputs[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFinding(Finding):
    """A backward op, or one that computes a derivative, that made non-finite gradients of finite ones.

    `forward` is the op that it belongs to, None for a custom Function. `excess_scale` is the loss scale if all
    gradients are finite without it. `discarded_by` is the later op that discards the forward's result where the
    derivative is infinite.
    """

    forward: OpCall | None
    excess_scale: float | None = None
    discarded_by: OpCall | None = None

    @property
    def reference_is_finite(self) -> bool:
        """True if the gradients of the fp32 run are finite at the same op, or all are if it has none there."""
        if self.op.phase != "backward":
            return self.reference_op is not None and self.reference_op.outputs_finite
        # A cast to fp32 has no backward in a run that is fp32 throughout.
        return self.reference.finite_gradients.get(self.op.key, not self.reference.bad_gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFinding:
    """An update that made weights non-finite, and what explains the op of it that did, if that was found."""

    update: OptimizerUpdate
    made: Account | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideTensor:
    """A non-finite or huge tensor that no traced op made; `name` is its path in the model or the batch.

    `low` is the format that the run computes products in, None if nothing was run. `built` is True if the model's own
    code makes it so. `in_fp32` is a constant's value in the fp32 run, None if it is not known.
    """

    name: str
    stats: TensorStats
    low: FloatFormat | None = None
    built: bool = False
    in_fp32: float | None = None


def outside_evidence(kind: str, finding: OutsideTensor, how: str = "is non-finite") -> tuple[Evidence, ...]:
    """Return the evidence that says what is wrong with the tensor; `kind` names the evidence."""
    text = f"{finding.name} {list(finding.stats.shape)} {how}"
    return (Evidence(kind, finding.name, text),)


def outside_domain(finding: Finding) -> float | None:
    """Return the argument's minimum or maximum if it is outside the op's domain, or on the edge of an open one."""
    domain = DOMAINS.get(finding.op.op)
    argument = finding.operand(domain.argument) if domain is not None else None
    if domain is None or argument is None or argument.min is None or argument.max is None or finding.had_inf_input:
        return None
    if "nan" not in finding.analysis.kinds and not domain.is_open:
        return None
    if argument.min < domain.low or (domain.is_open and argument.min == domain.low):
        return argument.min
    return argument.max if argument.max > domain.high or (domain.is_open and argument.max == domain.high) else None


def singular_edge(op: OpCall) -> float | None:
    """Return the edge of the op's domain that its argument reaches, or None; the derivative is infinite there."""
    domain = DOMAINS.get(op.op)
    is_smooth = op.op == "pow" and not any(name == "exponent" and value < 1 for name, value in op.scalars)
    if domain is None or is_smooth:
        return None
    taken = [tensor.stats for tensor in singular_inputs(op) if tensor.stats is not None]
    if any(stats.min == domain.low for stats in taken):
        return domain.low
    return domain.high if any(stats.max == domain.high for stats in taken) else None


def writes_infinity(op: OpCall) -> bool:
    """Return True if an infinity is among the numbers of the call: the code wrote it itself, as for a mask."""
    return any(math.isinf(value) for _, value in op.scalars)


def is_constant(tensor: OpTensor) -> bool:
    """Return True if the code made this tensor from numbers, such as an infinity: torch.tensor() is not a traced op."""
    counts = tensor.stats.counts if tensor.stats is not None else None
    return tensor.origin == "unknown" and counts is not None and not counts.num_nan


def only_value(stats: TensorStats | None) -> float | None:
    """Return the number that all elements of a finite tensor are, or None if they differ."""
    return stats.min if stats is not None and stats.finite and stats.min == stats.max else None


def find_zeros_behind(tensor: OpTensor, ops: Sequence[OpCall]) -> OpTensor | None:
    """Return the weight, else the buffer or array, that is 0 throughout and makes `tensor` so, or None.

    It is followed along ops that give nothing but zeros.
    """
    zeros = (taken for taken in _walk_back([tensor], ops, lambda taken: only_value(taken.stats) == 0) if taken.path)
    return min(zeros, key=lambda taken: taken.origin != "weight", default=None)


def _walk_back(
    tensors: Iterable[OpTensor], ops: Sequence[OpCall], follows: Callable[[OpTensor], bool]
) -> Iterator[OpTensor]:
    """Yield those tensors that are followed, then those that the ops that made them took, and so on."""
    waiting, seen = [*tensors], set[int]()
    for tensor in waiting:  # it grows meanwhile
        if follows(tensor):
            yield tensor
            made = maker_of(tensor, ops)
            if made is not None and made.order not in seen:
                seen.add(made.order)
                waiting += made.inputs


def list_behind(sites: Set[OpSite], ops: Sequence[OpCall]) -> frozenset[str]:
    """Return the arrays, weights and buffers that the ops at these sites compute from, as far as the trace knows.

    Whole numbers and flags are not followed: a mask does not change when what it was compared from moves a little.
    """
    taken = (tensor for op in ops if site_of(op) in sites for tensor in op.inputs)
    behind = _walk_back(taken, ops, lambda tensor: tensor.stats is not None)
    return frozenset(tensor.path for tensor in behind if tensor.path)


def list_sources(sites: Set[OpSite], ops: Sequence[OpCall]) -> tuple[frozenset[OpSite], frozenset[str]]:
    """Return what all arguments of the ops at these sites come from, the nearest: places of ops, and names of tensors.

    It can be moved alone: what is behind it reaches the arguments in no other way. If arguments have nothing in common,
    it is what each of them comes from.
    """
    orders, names = set[int](), set[str]()
    for op in (op for op in ops if site_of(op) in sites):
        reached = [found for tensor in op.inputs if any(found := _reach([tensor], ops))]
        shared = [set.intersection(*found) for found in zip(*reached, strict=True)]
        for made, held in [shared] if any(shared) else reached:
            latest = sorted(made)[-_DEPTH:]
            behind = {order: _reach(ops[order].inputs, ops) for order in latest}
            alone = [order for order in latest if not behind[order][0] & _reach(op.inputs, ops, but=order)[0]]
            orders |= set(alone).difference(*(behind[order][0] for order in alone))
            names |= held.difference(*(behind[order][1] for order in alone))
    return frozenset(site_of(ops[order]) for order in orders), frozenset(names)


def list_makers(sites: Set[OpSite], ops: Sequence[OpCall]) -> frozenset[OpSite]:
    """Return the places where that is made in which the ops at these sites are singular."""
    taken = (tensor for op in ops if site_of(op) in sites for tensor in singular_inputs(op))
    return frozenset(site_of(made) for tensor in taken if (made := maker_of(tensor, ops)) is not None)


def _reach(tensors: Iterable[OpTensor], ops: Sequence[OpCall], but: int = -1) -> tuple[set[int], set[str]]:
    """Return the ops that tensors come from, except moves, and the names of what these take; not past the op `but`."""
    found = [*_walk_back(tensors, ops, lambda tensor: tensor.producer != but)]
    made = {tensor.producer for tensor in found if tensor.producer is not None}
    names = {tensor.path for tensor in found if tensor.producer is None and tensor.path}
    return {order for order in made if ops[order].op not in MOVES}, names


def is_written(op: OpCall, name: str, ops: Sequence[OpCall]) -> bool:
    """Return True if the argument `name` is a number, a constant tensor or a buffer, at most moved, cast or filled in.

    A tensor that was computed, is a weight or comes from the batch is not.
    """
    tensor = op.find_input(name)
    while (maker := maker_of(tensor, ops)) is not None:
        if maker.op not in MOVES | CASTS | FILLS | UNFILLED:
            return False
        tensor = next(iter(maker.inputs), None)
    return tensor is None or tensor.origin not in ("weight", "batch")


def is_log_of_mask(op: OpCall, ops: Sequence[OpCall]) -> bool:
    """Return True for the logarithm of zeros and ones that are written, or cast from a non-floating-point tensor."""
    if op.op != "log" or op.analysis is None:
        return False
    mask, cast = op.analysis.operands[0], maker_of(op.inputs[0], ops)
    is_indicator = mask.min == 0 and mask.max == 1 and mask.counts.smallest == 1
    is_cast = cast is not None and cast.op in CASTS and all(tensor.stats is None for tensor in cast.inputs)
    return is_indicator and (is_cast or is_written(op, mask.name, ops))


def feeds_product(written: OpCall, ops: Iterable[OpCall]) -> bool:
    """Return True if the infinities of `written` reach a product along `ops`; those of a mask are gone by then."""
    return any(op.op in PRODUCTS for op in reached_ops({written.order}, ops))


def reached_ops(made: Set[int], ops: Iterable[OpCall]) -> Iterator[OpCall]:
    """Yield those of `ops`, in their order, that the non-finite values of the ops `made` reach."""
    carriers = {*made}
    for op in ops:
        if any(tensor.producer in carriers for tensor in op.nonfinite_inputs):
            carriers.add(op.order)
            yield op


def gradient_evidence(finding: GradientFinding) -> tuple[Evidence, ...]:
    """Return the size of the incoming gradient, and how much of the result is non-finite."""
    analysis = finding.analysis
    taken = [tensor.stats for tensor in finding.op.inputs if tensor.stats is not None]
    outgoing = nonfinite_part(analysis.kinds, analysis.num_bad, analysis.numel, "outgoing element")
    largest = largest_of(taken)
    num_bad = Evidence("num_bad", analysis.num_bad, outgoing)
    if largest is None:
        return (num_bad,)
    return (Evidence("grad_output_absmax", largest, f"the incoming gradient reaches {number(largest)}"), num_bad)


def is_whole_power(op: OpCall) -> bool:
    """Return True for a power with a whole exponent, which is defined for negative numbers too."""
    return op.op == "pow" and dict(op.scalars).get("exponent", 0.5).is_integer()
