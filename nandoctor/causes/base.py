"""What a cause decides on: the findings that are shown to it, and the questions that several causes ask of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nandoctor.evidence.edits import ClampArgument, Edit, GuardArgument, OpSite
from nandoctor.evidence.formats import FP32, FloatFormat
from nandoctor.evidence.report import Evidence
from nandoctor.evidence.trace import LOSS, OpAnalysis, OpCall, Operand, OpTensor, TensorStats
from nandoctor.ops import CASTS, CLAMPS, DIVISIONS, DOMAINS, FILLS, MAXIMA, MOVES, PRODUCTS, SINGULAR_INPUTS, UNFILLED
from nandoctor.text import nonfinite_part, number

_NEVER_NEGATIVE = frozenset(
    """abs square exp exp2 softmax sigmoid relu relu6 softplus sqrt rsqrt acos acosh cosh norm linalg_vector_norm
    linalg_norm linalg_matrix_norm frobenius_norm nuclear_norm var std cdist pairwise_distance dist mse_loss l1_loss
    smooth_l1_loss huber_loss""".split()
)
_STAYS_SO = frozenset(
    """sum nansum mean nanmean amax amin max min cumsum prod cumprod mul div add reciprocal pow log1p expm1 median
    maximum minimum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    max_pool1d max_pool2d max_pool3d matmul mm bmm outer einsum""".split()
)
"""Of tensors that are nowhere negative these make none that is; an op that moves values takes indices beside them."""
_FACTORS = frozenset({"other", "alpha", "value", "min"})
_DEPTH = 16


def is_nonnegative(tensor: OpTensor, ops: Mapping[int, OpCall], depth: int = _DEPTH) -> bool:
    """Tell whether no batch can make the tensor negative; False in doubt."""
    op = ops.get(tensor.producer) if tensor.producer is not None else None
    if op is None or depth == 0:
        return False
    scalars = dict(op.scalars)
    if op.op in _NEVER_NEGATIVE or (op.op == "pow" and scalars.get("exponent", 1.0) % 2 == 0) or _is_square(op, ops):
        return True
    floats = [taken for taken in op.inputs if taken.stats is not None]
    proved = [is_nonnegative(taken, ops, depth - 1) for taken in floats]
    if op.op in CLAMPS | MAXIMA and (any(proved[1:]) or scalars.get("min", scalars.get("min_val", -1.0)) >= 0):
        return True
    moves = op.op in (MOVES | CASTS) - {"copy"}
    takes_all = moves or (op.op in _STAYS_SO and len(floats) == len(op.inputs))
    return takes_all and bool(proved) and all(proved) and all(scalars.get(name, 0.0) >= 0 for name in _FACTORS)


def _is_square(op: OpCall, ops: Mapping[int, OpCall]) -> bool:
    """Tell whether the op multiplies a tensor by itself; one of two halves that a split gave is another tensor."""
    if op.op != "mul" or len(op.inputs) != 2:
        return False
    one, other = op.inputs
    same = (one.producer, one.origin, one.path) == (other.producer, other.origin, other.path)
    if one.producer is None:
        return same and one.origin in ("weight", "buffer", "batch")
    return same and one.producer in ops and len(ops[one.producer].outputs) == 1


CausePhase = Literal[
    "forward", "backward", "swallowed", "constant", "weight", "buffer", "input", "target", "optimizer", "update"
]
"""What is shown to a cause: an op of the forward pass or the loss, of the backward pass, or one whose infinity a later
op swallowed; a tensor that the code made of numbers, or that the model, the batch or the optimizer brought along; or an
optimizer's update."""

Candidate = tuple[Edit, ...]
"""One change in several strengths, the first that passes being the one to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnalysedOp:
    """An op at fault; `ops` are all ops of its run, by order, and `low` is what products are computed in.

    `references` are the ops of the fp32 run, by their keys.
    """

    op: OpCall
    ops: Mapping[int, OpCall]
    low: FloatFormat
    references: Mapping[tuple[str, int, str, int], OpCall] = field(default_factory=dict)

    @property
    def analysis(self) -> OpAnalysis:
        """The analysis of the op, which every finding has."""
        assert self.op.analysis is not None
        return self.op.analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(_AnalysedOp):
    """An op that made non-finite values, with all that a rule may ask about.

    `reference_op` is the same op of the fp32 run, None where that took another way.
    """

    reference_op: OpCall | None
    had_inf_input: bool

    @property
    def format(self) -> FloatFormat:
        """The format that its values had to fit: its output's, or that of a product to which vmap adds a bias."""
        made, exact = self.op.outputs[0].dtype, self.analysis.exact
        is_summed = self.op.op in PRODUCTS and made is FP32 and exact is not None and made.holds(exact)
        return self.low if is_summed else made

    @property
    def overflowed(self) -> bool:
        """True where unlimited range would have kept at least one of the non-finite elements finite."""
        return self.analysis.overflowed

    @property
    def is_past_float64(self) -> bool:
        """True where finite operands gave infinities and no NaN, as a sum or a product past float64's limit does."""
        return not self.had_inf_input and "nan" not in self.analysis.kinds

    @property
    def reference_is_finite(self) -> bool:
        """True where fp32 gave finite values at this very op."""
        return self.reference_op is not None and self.reference_op.outputs_finite

    def operand(self, name: str) -> Operand | None:
        """The examined input of this name."""
        return next((operand for operand in self.analysis.operands if operand.name == name), None)

    def sources(self, tensor: OpTensor) -> Iterator[OpCall]:
        """The op that made `tensor`, and behind ops that only move or cast values the one before, and so on."""
        order = tensor.producer
        while order is not None and order in self.ops:
            op = self.ops[order]
            yield op
            order = op.inputs[0].producer if op.op in MOVES | CASTS and op.inputs else None

    def is_from_batch(self, tensor: OpTensor) -> bool:
        """Tell whether this is an array of the batch, as it came or moved and cast."""
        if tensor.origin == "batch":
            return True
        first = [*self.sources(tensor)][-1:]
        return any(op.op in MOVES | CASTS and op.inputs and op.inputs[0].origin == "batch" for op in first)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFinding(_AnalysedOp):
    """A backward op that made non-finite gradients of finite ones.

    `forward` is the op it belongs to, None for a custom Function. `reference_is_finite` where the gradients of the fp32
    run are finite at the same op, `fixed_by_scale` where all gradients are finite at loss scale 1.
    """

    forward: OpCall | None
    reference_is_finite: bool
    fixed_by_scale: bool
    loss_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideTensor:
    """A non-finite or huge tensor that no traced op made; `name` is its path in the model or the batch.

    `low` is what the run computes its products in, None where nothing was run. `built` tells that the model's own code
    makes it so. `in_fp32` is the number that a constant is in the fp32 run, where that holds it.
    """

    name: str
    stats: TensorStats
    low: FloatFormat | None = None
    built: bool = False
    in_fp32: float | None = None


def outside_evidence(kind: str, finding: OutsideTensor, how: str = "is non-finite") -> tuple[Evidence, ...]:
    """The tensor, called by its `kind`, and what is wrong with it."""
    text = f"{finding.name} {list(finding.stats.shape)} {how}"
    return (Evidence(kind, finding.name, text),)


def factors(finding: Finding) -> list[Operand]:
    """The operands that a product multiplies; a bias or what the product is added to is none."""
    product = PRODUCTS.get(finding.op.op)
    return [operand for operand in finding.analysis.operands if product and product.has_factor(operand.name)]


def outside_domain(finding: Finding) -> float | None:
    """The end of the argument's range that lies outside of the function's domain, or on the edge of an open one."""
    domain = DOMAINS.get(finding.op.op)
    argument = finding.operand(domain.argument) if domain is not None else None
    if domain is None or argument is None or argument.min is None or argument.max is None or finding.had_inf_input:
        return None
    if "nan" not in finding.analysis.kinds and not domain.is_open:
        return None
    if argument.min < domain.low or (domain.is_open and argument.min == domain.low):
        return argument.min
    return argument.max if argument.max > domain.high or (domain.is_open and argument.max == domain.high) else None


def singular_inputs(op: OpCall) -> tuple[OpTensor, ...]:
    """The inputs at one value of which the op, or its derivative, is infinite."""
    names = SINGULAR_INPUTS.get(op.op, ())
    return tuple(tensor for tensor in op.inputs if tensor.name in names)


def singular_edge(op: OpCall) -> float | None:
    """The edge of its domain that the op's argument meets, where the op is finite and its derivative is not."""
    domain = DOMAINS.get(op.op)
    is_smooth = op.op == "pow" and not any(name == "exponent" and value < 1 for name, value in op.scalars)
    for tensor in singular_inputs(op) if domain is not None and not is_smooth else ():
        assert domain is not None
        if tensor.stats is not None and tensor.stats.min == domain.low:
            return domain.low
        if tensor.stats is not None and tensor.stats.max == domain.high:
            return domain.high
    return None


def writes_infinity(op: OpCall) -> bool:
    """Tell whether the code wrote an infinity there itself, as masks are made: it is among the numbers of the call."""
    return any(math.isinf(value) for _, value in op.scalars)


def is_constant(tensor: OpTensor) -> bool:
    """Tell whether the code made this of numbers it wrote down, infinities among them: torch.tensor() is no op."""
    counts = tensor.stats.counts if tensor.stats is not None else None
    return tensor.origin == "unknown" and counts is not None and not counts.num_nan


def is_written(op: OpCall, name: str, ops: Mapping[int, OpCall]) -> bool:
    """Tell whether the argument `name` was written down or stored, and not computed: a 0-dim tensor can be either."""
    tensor = op.find_input(name)
    while tensor is not None and tensor.producer is not None:
        maker = ops[tensor.producer]
        if maker.op not in MOVES | CASTS | FILLS | UNFILLED:
            return False
        tensor = next(iter(maker.inputs), None)
    return tensor is None or tensor.origin not in ("weight", "batch")


def is_log_of_mask(op: OpCall, ops: Sequence[OpCall]) -> bool:
    """Tell whether this is the logarithm of a mask of zeros and ones that was no floating-point tensor before."""
    if op.op != "log" or not op.inputs or op.inputs[0].producer is None or op.analysis is None:
        return False
    mask, cast = op.analysis.operands[0], ops[op.inputs[0].producer]
    is_indicator = mask.min == 0 and mask.max == 1 and mask.counts.smallest == 1
    return is_indicator and cast.op in CASTS and all(tensor.stats is None for tensor in cast.inputs)


def feeds_product(written: OpCall, ops: Iterable[OpCall]) -> bool:
    """Tell whether the infinities of `written` reach a product along `ops`: a mask's are gone by then."""
    return any(op.op in PRODUCTS for op in _reached_ops(written, ops))


def is_infinite_loss(made: OpCall, ops: Mapping[int, OpCall]) -> bool:
    """Tell whether the infinities of `made` stay so, and are of a loss: made in it, or in a number of the model's."""
    later = [ops[order] for order in sorted(ops) if order > made.order and ops[order].phase != "backward"]
    reached = [*_reached_ops(made, later)]
    if any(tensor.counts is not None and tensor.counts.num_nan for op in reached for tensor in op.outputs):
        return False
    return made.module == LOSS or any(op.module != LOSS and op.outputs[0].shape == () for op in reached)


def _reached_ops(made: OpCall, ops: Iterable[OpCall]) -> Iterator[OpCall]:
    """Those of `ops`, in their order, that the non-finite values of `made` reach."""
    carriers = {made.order}
    for op in ops:
        if any(tensor.producer in carriers for tensor in op.nonfinite_inputs):
            carriers.add(op.order)
            yield op


def ancestors(
    ops: Mapping[int, OpCall], tensor: OpTensor, steps: int, *, through: frozenset[str] | None = None
) -> Iterator[OpCall]:
    """The ops that made `tensor`, nearest first, at most `steps` deep; where given, seen `through` these ops alone."""
    wave, seen = [tensor.producer], set()
    for _ in range(steps):
        following: list[int | None] = []
        for order in wave:
            if order is None or order not in ops or order in seen:
                continue
            seen.add(order)
            yield ops[order]
            if through is None or ops[order].op in through:
                following += [parent.producer for parent in ops[order].inputs]
        wave = following


def descendants(
    ops: Mapping[int, OpCall], made: int, steps: int, *, through: frozenset[str] | None = None
) -> Iterator[OpCall]:
    """The ops that take what the op `made` gave, nearest first, as `ancestors` gives those before it."""
    wave = {made}
    for _ in range(steps):
        found = [op for op in ops.values() if any(tensor.producer in wave for tensor in op.inputs)]
        yield from found
        wave = {op.order for op in found if through is None or op.op in through}


def gradient_evidence(finding: GradientFinding) -> tuple[Evidence, ...]:
    """How large the incoming gradient is, and how much of the outgoing one is non-finite."""
    analysis = finding.analysis
    incoming = [operand.absmax for operand in analysis.operands if operand.absmax is not None]
    outgoing = nonfinite_part(analysis.kinds, analysis.num_bad, analysis.numel, "outgoing element")
    reached = (
        Evidence("grad_output_absmax", value, f"the incoming gradient reaches {number(value)}")
        for value in sorted(incoming)[-1:]
    )
    return (*reached, Evidence("num_bad", analysis.num_bad, outgoing))


def site_of(op: OpCall) -> OpSite:
    """Where a traced op stands in the code."""
    return OpSite(module=op.module, type=op.type, op=op.op, nth=op.nth, source=op.source)


def clamp_candidate(op: OpCall, argument: str, bounds: Sequence[tuple[float | None, float | None]]) -> Candidate:
    """The argument of an op clamped to each of the `bounds`, (low, high)."""
    return tuple(ClampArgument(site=site_of(op), argument=argument, low=low, high=high) for low, high in bounds)


def divisor_candidate(op: OpCall, divisor: OpTensor, ops: Mapping[int, OpCall], smallest: Sequence[float]) -> Candidate:
    """The divisor kept at each of these distances from zero; on its own side where a batch may make it negative."""
    of_root = op.op in DOMAINS and not is_whole_power(op)
    signed = not (of_root or is_nonnegative(divisor, ops))
    site = site_of(op)
    return tuple(ClampArgument(site=site, argument=divisor.name, low=low, keeps_sign=signed) for low in smallest)


def is_whole_power(op: OpCall) -> bool:
    """Tell whether this is a power with a whole exponent, which negative numbers have as well."""
    return op.op == "pow" and dict(op.scalars).get("exponent", 0.5).is_integer()


def guard_candidate(op: OpCall, *, edge: float | None = None) -> Candidate:
    """The op kept away from where it, or its derivative, is infinite; empty where that is not known.

    Where the `edge` that was met is given, the other one is left as it is: acos is 0 at 1, and pi at -1.
    """
    domain = DOMAINS.get(op.op)
    if is_whole_power(op):
        return (GuardArgument(site=site_of(op), argument="self", safe=1.0),)
    if domain is not None:
        ends = (domain.low, domain.high)
        low, high = (end if math.isfinite(end) and edge in (None, end) else None for end in ends)
        safe = domain.low + 1 if math.isinf(domain.high) else sum(ends) / 2
        return (GuardArgument(site=site_of(op), argument=domain.argument, low=low, high=high, safe=safe),)
    names = SINGULAR_INPUTS.get(op.op, ()) if op.op in DIVISIONS else ()
    return tuple(GuardArgument(site=site_of(op), argument=name, safe=1.0) for name in names[:1])
