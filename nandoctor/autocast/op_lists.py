"""CUDA autocast's op lists, as data.

Tuples of `aten` op names with overload; `tests/autocast/test_op_lists.py` compares them with the macros of the
installed torch's `ATen/autocast_mode.h`.
"""

from __future__ import annotations

# Every floating-point tensor is cast to the region's dtype: AT_FORALL_LOWER_PRECISION_FP.
LOWER_PRECISION = tuple(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    """.split()
)

# Ops of LOWER_PRECISION that CUDA runs as several kernels, each of which rounds its result for the next.
SEVERAL_PRODUCTS = ("einsum", "chain_matmul", "linalg_multi_dot")

# On CUDA the RNN modules call `_cudnn_rnn`; its autocast kernel casts to fp16 whatever the region's dtype is:
# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cudnn/AutocastRNN.cpp
CUDNN_RNN = tuple(
    """
    lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data
    """.split()
)

# Every floating-point tensor is cast to fp32: AT_FORALL_FP32.
FP32 = tuple(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """.split()
)

# Called with dtype=float32, unless the caller names a dtype: AT_FORALL_FP32_SET_OPT_DTYPE.
FP32_SET_OPT_DTYPE = tuple(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """.split()
)

# Redispatched to the overload that takes a result dtype: AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE.
FP32_APPEND_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

# Every floating-point tensor is cast to the widest type among them: AT_FORALL_PROMOTE.
PROMOTE = tuple(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """.split()
)

# Refused with an error: registered by hand in aten/src/ATen/autocast_mode.cpp.
BANNED = ("binary_cross_entropy",)

# Not on CUDA's lists: its kernels keep statistics in fp32 (at::acc_type) and round only the output. A CPU's round the
# inverse deviation to fp16 too: with an eps below 2e-10, a constant channel is 0 * inf there and 0 on CUDA.
NORMS = ("batch_norm", "instance_norm")

# Not on CUDA's lists: its kernels compute them in fp32 (at::acc_type, at::opmath_type) and round only the result. A
# CPU's round in between: `logit` loses an eps below the format's resolution, a sum over a pool exceeds 65504.
ROUNDED_ONCE_ON_CUDA = ("logit", "adaptive_avg_pool3d")

# Ops of PROMOTE that CUDA computes in the same way if every operand is in half precision.
PROMOTED_AND_ROUNDED_ONCE = ("addcdiv", "addcmul", "dot", "vdot", "grid_sampler", "tensordot")

# Not on CUDA's lists: there they keep the half precision of their input, and a CPU has no such kernels. Found by
# comparing `dtypes` and `dtypesIfCUDA` in torch.testing._internal.common_methods_invocations.op_db.
HALF_ON_CUDA_ALONE = tuple(
    """
    avg_pool3d rrelu polar stft fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2
    fft_irfft2 fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn
    """.split()
)

# Not on CUDA's lists: it rounds a 0-d tensor to the format of the half-precision tensor that it multiplies or divides,
# which a CPU does not do.
SCALING = ("mul.Tensor", "mul_.Tensor", "div.Tensor", "div_.Tensor", "div.Tensor_mode", "div_.Tensor_mode")

CASTS = ("to.dtype", "to.dtype_layout", "to.device", "_to_copy")
"""The ops of a model's own casts; not on CUDA's lists, and relevant only to the fp32 reference."""
