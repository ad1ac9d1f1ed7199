"""What a rule is: a function from a `Finding` to a `Cause`, or None where it cannot decide.

In: an examined op with its twin in fp32 and the ops before it. Out: the finding, and the questions that rules ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nandoctor.evidence.edits import ClampArgument, Edit, OpSite
from nandoctor.evidence.formats import FORMATS, FloatFormat
from nandoctor.evidence.report import Evidence
from nandoctor.evidence.trace import OpAnalysis, OpCall, Operand, OpTensor


def words(text: str) -> frozenset[str]:
    """A table of names, written as text."""
    return frozenset(text.split())


PRODUCTS = words(
    """matmul mm bmm linear mv dot vdot addmm addmv addr baddbmm addbmm einsum bilinear tensordot linalg_vecdot inner
    outer chain_matmul linalg_multi_dot conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d
    conv_transpose3d conv_tbc scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell"""
)
REDUCTIONS = words(
    """sum nansum mean nanmean var std var_mean std_mean prod cumsum cumprod norm linalg_vector_norm linalg_norm
    linalg_matrix_norm frobenius_norm logsumexp logcumsumexp trace avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d dist cdist index_add scatter_add scatter_reduce index_reduce
    segment_reduce embedding_bag fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn
    fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_ihfft stft istft"""
)
EXPONENTIALS = words("exp exp2 expm1 sinh cosh softplus special_exp2 special_expm1 pow")
LOGARITHMS = words("log log2 log10 log1p logit special_logit xlogy special_xlogy special_log1p")
DIVISIONS = words("div true_divide divide reciprocal rsqrt remainder fmod addcdiv floor_divide")
SOFTMAXES = words("softmax log_softmax _softmax _log_softmax logsumexp scaled_dot_product_attention masked_softmax")
NORMALISATIONS = words("batch_norm layer_norm group_norm instance_norm rms_norm")
CASTS = words("to _to_copy half bfloat16 type_as type copy")
MOVES = words(
    """view reshape _unsafe_view transpose permute contiguous expand expand_as unsqueeze squeeze flatten unflatten clone
    detach slice select narrow split chunk unbind index gather t mT T movedim roll flip cat stack repeat
    repeat_interleave alias dropout numpy_T as_strided lift_fresh pad constant_pad_nd unfold"""
)
"""Ops that hand values on as they are."""
FILLS = words("full full_like new_full fill masked_fill where scalar_tensor constant_pad_nd")
"""Ops that put a given number in places."""


Candidate = tuple[Edit, ...]
"""One change in several strengths, the first that cures being the one to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An op that made non-finite values, with all that a rule may ask about.

    `twin` is the same op of the fp32 run, None where that took another way. `ops` are all traced ops, by order.
    """

    op: OpCall
    twin: OpCall | None
    had_inf_input: bool
    ops: Mapping[int, OpCall]
    low: FloatFormat

    @property
    def analysis(self) -> OpAnalysis:
        """The analysis of the op, which every finding has."""
        assert self.op.analysis is not None
        return self.op.analysis

    @property
    def format(self) -> FloatFormat:
        """The format of the op's output, which its values had to fit."""
        return self.op.outputs[0].dtype

    @property
    def overflowed(self) -> bool:
        """Whether unlimited range would have kept at least one of the bad elements finite."""
        return self.analysis.num_exact_finite > 0

    @property
    def twin_is_finite(self) -> bool:
        """Whether fp32 made finite values at this very op."""
        return self.twin is not None and all(stats.finite for stats in self.twin.outputs)

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
        """Whether this is an array of the batch, as it came or moved and cast."""
        if tensor.origin == "batch":
            return True
        first = [*self.sources(tensor)][-1:]
        return any(op.op in MOVES | CASTS and op.inputs and op.inputs[0].origin == "batch" for op in first)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFinding:
    """A backward op that made non-finite gradients of finite ones.

    `forward` is the op it belongs to, None for a custom Function. `twins_are_finite` tells whether the fp32 run's
    gradients are finite at the same op, `fixed_by_scale` whether all gradients are at loss scale 1.
    """

    op: OpCall
    forward: OpCall | None
    twins_are_finite: bool
    fixed_by_scale: bool
    loss_scale: float
    ops: Mapping[int, OpCall]
    low: FloatFormat

    @property
    def analysis(self) -> OpAnalysis:
        """The analysis of the op, which every finding has."""
        assert self.op.analysis is not None
        return self.op.analysis


def writes_infinity(op: OpCall) -> bool:
    """Whether the code put an infinity there itself, as masks are made: it stands among the numbers of the call."""
    return any(math.isinf(value) for _, value in op.scalars)


def is_constant(tensor: OpTensor) -> bool:
    """Whether the code made this of numbers it wrote down, infinities among them: torch.tensor() is no op."""
    counts = tensor.stats.counts if tensor.stats is not None else None
    return tensor.origin == "unknown" and counts is not None and not counts.num_nan


def is_log_of_mask(op: OpCall, ops: Sequence[OpCall]) -> bool:
    """Whether this is the logarithm of a mask of zeros and ones that was no floating-point tensor before."""
    if op.op != "log" or not op.inputs or op.inputs[0].producer is None or op.analysis is None:
        return False
    mask, cast = op.analysis.operands[0], ops[op.inputs[0].producer]
    is_indicator = mask.min == 0 and mask.max == 1 and mask.counts.smallest == 1
    return is_indicator and cast.op in CASTS and all(tensor.stats is None for tensor in cast.inputs)


def feeds_product(written: OpCall, ops: Iterable[OpCall]) -> bool:
    """Whether the infinities of `written` reach a product along `ops`: as masks they would have been gone by then."""
    carriers = {written.order}
    for op in ops:
        bad = (tensor for tensor in op.inputs if tensor.stats is not None and not tensor.stats.finite)
        if any(tensor.producer in carriers for tensor in bad):
            if op.op in PRODUCTS:
                return True
            carriers.add(op.order)
    return False


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


def gradient_evidence(finding: GradientFinding) -> tuple[Evidence, ...]:
    """What came in, and how much of what went out is bad."""
    incoming = max(
        (operand.absmax for operand in finding.analysis.operands if operand.absmax is not None), default=None
    )
    analysis = finding.analysis
    return (
        Evidence(name="grad_output_absmax", value=incoming, text=f"the incoming gradient reaches {number(incoming)}"),
        Evidence(
            name="num_bad",
            value=analysis.num_bad,
            text=f"{analysis.num_bad} of {analysis.numel} outgoing elements are {' or '.join(analysis.kinds)}",
        ),
    )


def format_of(operand: Operand) -> FloatFormat:
    """The format that an examined operand is stored in."""
    return FORMATS[operand.dtype]


def number(value: float | None) -> str:
    """A value as people read it: 65504, 1.48e+05, 1e-08."""
    if value is None:
        return "?"
    return f"{value:.0f}" if 1 <= abs(value) < 1e5 and value == round(value) else f"{value:.4g}"


def overflow_evidence(finding: Finding) -> tuple[Evidence, ...]:
    """By how much the exact value passes the format's limit, and how many elements do."""
    analysis, limit = finding.analysis, finding.format.max
    exact = analysis.exact_absmax or 0.0
    return (
        Evidence(
            name="would_be",
            value=exact,
            text=f"the largest would be {number(exact)}, {exact / limit:.3g} times what {finding.format} can hold "
            f"({number(limit)})",
        ),
        Evidence(
            name="num_bad",
            value=analysis.num_bad,
            text=f"{analysis.num_bad} of {analysis.numel} elements are non-finite",
        ),
    )


def site_of(op: OpCall) -> OpSite:
    """Where a traced op stands in the code."""
    return OpSite(module=op.module, type=op.type, op=op.op, nth=op.nth, source=op.source)


def clamp_candidate(op: OpCall, argument: str, bounds: Sequence[tuple[float | None, float | None]]) -> Candidate:
    """The argument of an op clamped to each of the `bounds`, (low, high)."""
    return tuple(ClampArgument(site=site_of(op), argument=argument, low=low, high=high) for low, high in bounds)


def constant_argument(op: OpCall, constant: float) -> str | None:
    """The name of the argument that this number is, or that its negative is."""
    return next((name for name, value in op.scalars if abs(value) == abs(constant)), None)
