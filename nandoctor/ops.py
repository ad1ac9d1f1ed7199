"""What nandoctor knows about torch's ops: families, singular points, domains, lengths of products, autocast lists.

Ops are known by their aten names, without namespace, overload or the in-place underscore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ALIASES = {
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "ger": "outer",
    "linalg_matmul": "matmul",
    "matrix_power": "linalg_matrix_power",
    "moveaxis": "movedim",
    "multiply": "mul",
    "special_expit": "sigmoid",
    "special_gammaln": "lgamma",
    "special_multigammaln": "mvlgamma",
    "special_psi": "digamma",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "true_divide": "div",
    **{
        f"special_{name}": name
        for name in "digamma erfinv exp2 expm1 i0 log1p log_softmax logit logsumexp softmax xlogy".split()
    },
}


def canonical(name: str) -> str:
    """Return the name of an op of which torch has several."""
    return _ALIASES.get(name, name)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


Arguments = Mapping[str, Any]
"""The arguments of a call by their schema names; those that equal their default may be missing."""


def _product(text: str, *factors: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(_names(text), factors)


_MATRIX_PRODUCTS = {
    **_product("matmul inner", "self", "other"),
    **_product("mm bmm", "self", "mat2"),
    **_product("mv", "self", "vec"),
    **_product("dot", "self", "tensor"),
    **_product("vdot", "self", "other"),
    **_product("linalg_matrix_power", "self"),
    **_product("addmm _addmm_activation", "mat1", "mat2"),
    **_product("addmv", "mat", "vec"),
    **_product("baddbmm", "batch1", "batch2"),
    **_product("scaled_dot_product_attention _scaled_dot_product_flash_attention", "query", "key"),
    **_product("_native_multi_head_attention", "query", "qkv_weight"),
}
"""Each element sums as many terms as the last dimension of the first factor has."""
_WEIGHTED_SUMS = {
    **_product("linear", "input", "weight"),
    **_product("bilinear", "input1", "input2", "weight"),
    **_product("conv1d conv2d conv3d", "input", "weight"),
}
"""Each element sums as many terms as a row of the weight has."""
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    **_MATRIX_PRODUCTS,
    **_WEIGHTED_SUMS,
    **_product("linalg_vecdot", "x", "y"),
    **_product("tensordot", "self", "other"),
    **_product("einsum", "tensors"),
    **_product("addbmm", "batch1", "batch2"),
    **_product("addr", "vec1", "vec2"),
    **_product("outer", "self", "vec2"),
    **_product("chain_matmul", "matrices"),
    **_product("linalg_multi_dot", "tensors"),
    **_product("convolution _convolution", "input", "weight"),
    **_product("conv_transpose1d conv_transpose2d conv_transpose3d", "input", "weight"),
    **_product("conv_tbc", "self", "weight"),
    **_product("lstm gru rnn_tanh rnn_relu", "input", "data", "hx", "params[0]", "params[1]"),
    **_product("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", "input", "hx", "w_ih", "w_hh"),
}
"""Matrix products, convolutions, attention and recurrent layers, with the schema names of what they multiply.

A name of a list of tensors stands for all of its items.
"""


def is_factor(op: str, name: str) -> bool:
    """Return True if the product `op` multiplies the tensor `name` ("weight", "tensors[1]")."""
    return not {name, name.partition("[")[0]}.isdisjoint(PRODUCTS.get(op, ()))


def num_terms(op: str, taken: Arguments) -> int | None:
    """Return how many terms one element of a product sums, by the shapes that it takes; None if they do not tell."""
    if op in _WEIGHTED_SUMS:
        return int(math.prod(taken["weight"].shape[1:]))
    if op in _MATRIX_PRODUCTS:
        return int(math.prod(taken[_MATRIX_PRODUCTS[op][0]].shape[-1:]))
    return None


_ADDED_TO = _names("addmm _addmm_activation addmv addr baddbmm addbmm")
_ONLY_WRITTEN = _names(
    """copy fill zero normal uniform exponential full_like zeros_like ones_like rand_like randn_like randint_like
    new_full new_zeros new_ones"""
)


def unread_inputs(name: str, arguments: Arguments) -> tuple[str, ...]:
    """Return the inputs that the op does not read with these arguments: it only writes to them, or takes their shape.

    With a `beta` of 0 this includes the tensor that a product is added to.
    """
    if name in ("expand_as", "view_as", "reshape_as", "type_as"):
        return ("other",)
    is_unread = name in _ONLY_WRITTEN or (name in _ADDED_TO and arguments.get("beta", 1) == 0)
    return ("self",) if is_unread else ()


REDUCTIONS = _names(
    """sum nansum mean nanmean var std var_mean std_mean prod cumsum cumprod norm linalg_vector_norm linalg_norm
    linalg_matrix_norm frobenius_norm nuclear_norm logsumexp logcumsumexp trace avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d dist cdist index_add scatter_add scatter_reduce
    index_reduce segment_reduce embedding_bag fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2
    fft_rfftn fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_ihfft stft istft"""
)
SPREADS = _names("std var std_mean var_mean")
SERIAL_PRODUCTS = _names("prod cumprod")
"""Reductions that multiply, and so can overflow float64 where no sum of finite terms does."""
EXPONENTIALS = _names("exp exp2 expm1 sinh cosh i0 softplus pow")
GROWING_ON_BOTH_SIDES = _names("sinh cosh i0")
"""Exponentials that grow on both sides of 0."""
LOGARITHMS = _names("log log2 log10 log1p logit xlogy")
DIVISIONS = _names("div reciprocal rsqrt remainder fmod addcdiv floor_divide")
SOFTMAXES = _names("softmax log_softmax _softmax _log_softmax logsumexp scaled_dot_product_attention")
NORMALISATIONS = _names(
    """batch_norm native_batch_norm cudnn_batch_norm layer_norm native_layer_norm group_norm native_group_norm
    instance_norm rms_norm _fused_rms_norm"""
)
SUBTRACTIONS = _names("sub rsub")
SUMS = SUBTRACTIONS | _names("add")
WITHOUT_POLES = SUMS | {"mul", "square", "addcmul", "lerp"}
"""Polynomials, whose derivatives are finite wherever their arguments are."""
SCALINGS = _names("mul div")
CLAMPS = _names("clamp clamp_min clamp_max hardtanh")
MAXIMA = _names("maximum fmax max")
MINIMA = _names("minimum fmin min")
CASTS = _names("to _to_copy type_as copy")
MOVES = _names(
    """view reshape _unsafe_view transpose permute contiguous expand expand_as unsqueeze squeeze flatten unflatten clone
    detach slice select narrow split chunk unbind index gather t mT numpy_T movedim roll flip cat stack repeat
    repeat_interleave alias dropout as_strided lift_fresh pad constant_pad_nd unfold broadcast_tensors broadcast_to"""
)
"""Ops that pass values on unchanged."""
FILLS = _names("full full_like new_full fill masked_fill where scalar_tensor pad constant_pad_nd")
"""Ops that write a given number to some elements."""
CHECKED_FILLS = _names("full full_like new_full fill masked_fill pad constant_pad_nd")
"""The FILLS that raise if the number does not fit the format."""
UNFILLED = _names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
"""Ops that return uninitialized memory; it may be filled without an op, as by torch.tensor()."""
SELECTIONS = _names("where masked_fill masked_scatter masked_select nan_to_num index")
"""Ops that select some elements of a tensor; the gradient of the others is zero."""
SEES_NAN = _names(
    "isnan isfinite isinf isposinf isneginf isreal nan_to_num nansum nanmean nanmedian nanquantile fmax fmin"
)
"""Ops that are meant for tensors with NaN in them."""
COMPARISONS = _names("gt ge lt le eq ne greater greater_equal less less_equal not_equal isclose")


def is_average(name: str) -> bool:
    """Return True if the op averages (a reduction or a loss), so that it gives 0/0 with nothing to average."""
    return name in REDUCTIONS or "loss" in name or "cross_entropy" in name


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The interval from `low` to `high` where a real function is defined; if `is_open`, it is infinite at its ends.

    `argument` is the schema name of the input that the interval applies to.
    """

    low: float
    high: float
    is_open: bool = False
    argument: str = "self"

    @property
    def inside(self) -> float:
        """An argument that is far from both ends."""
        return self.low + 1 if math.isinf(self.high) else (self.low + self.high) / 2


DOMAINS: Mapping[str, Domain] = {
    **dict.fromkeys(_names("sqrt rsqrt log log2 log10 pow"), Domain(low=0.0, high=math.inf)),
    "xlogy": Domain(low=0.0, high=math.inf, argument="other"),
    "log1p": Domain(low=-1.0, high=math.inf),
    **dict.fromkeys(_names("acos asin"), Domain(low=-1.0, high=1.0)),
    "acosh": Domain(low=1.0, high=math.inf),
    "logit": Domain(low=0.0, high=1.0),
    **dict.fromkeys(_names("atanh erfinv"), Domain(low=-1.0, high=1.0, is_open=True)),
    **dict.fromkeys(_names("lgamma digamma mvlgamma"), Domain(low=0.0, high=math.inf, is_open=True)),
    "batch_norm": Domain(low=0.0, high=math.inf, argument="running_var"),
}

POINTWISE = EXPONENTIALS | LOGARITHMS | DIVISIONS | (DOMAINS.keys() - NORMALISATIONS)
"""Elementwise functions that are infinite for some finite inputs."""

SINGULAR_INPUTS: Mapping[str, tuple[str, ...]] = {
    **{name: (domain.argument,) for name, domain in DOMAINS.items() if name not in NORMALISATIONS},
    **dict.fromkeys(_names("reciprocal"), ("self",)),
    **dict.fromkeys(_names("div remainder fmod floor_divide"), ("other",)),
    "addcdiv": ("tensor2",),
    "_weight_norm": ("v",),  # g * v / norm(v)
    **dict.fromkeys(_names("atan2"), ("self", "other")),
}
"""The inputs for which an op, or its derivative, is infinite at some value: at zero, or at an end of its domain."""

BACKWARD_HOOK = "full_backward_hook"
"""The op name for what the user's full backward hooks return; they run in an autograd Function of torch's own."""
HIDDEN_LOGARITHMS = {
    "logdet": "the determinant is zero",
    "linalg_slogdet": "the determinant is zero",
    "ctc_loss": "no alignment of a target fits the length of its input, so its probability is zero",
}
"""Ops that take the logarithm of an intermediate result, and when that is zero."""
NEGATIVE_LOGARITHMS = {"logdet": "the determinant is negative"}
"""Those of them that are NaN if the intermediate result is negative."""
HAS_STABLE_LOGARITHM = _names("softmax sigmoid tanh exp expm1 cosh i0 erf erfc")

# CUDA's kernels add this eps to statistics in fp32 (at::acc_type), whatever the input is: layer_norm_kernel.cu,
# group_norm_kernel.cu, Normalization.cuh, rms_norm_composite, UnarySpecialOpsKernel.cu.
EPS_IN_FP32 = NORMALISATIONS | _names("logit")
EPS_IN_INPUT = _names("pairwise_distance")
"""Ops that add their eps to the difference of their inputs, before the norm that autocast runs in fp32."""
