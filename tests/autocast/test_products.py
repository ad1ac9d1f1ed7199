"""Emulated low-precision arithmetic: what is rounded, where, and what the gradients see."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nandoctor.autocast.policy import REFERENCE, Policy, apply_policy, cuda_autocast
from nandoctor.evidence.formats import FP16

CPU = torch.device("cpu")
LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def rounded(tensor, dtype=torch.float16):
    return tensor.to(dtype).float()


ONE = torch.ones(1, 1)
HALF, MATRIX = torch.full((4,), 300.0).half(), torch.full((2, 2), 300.0).half()
DOUBLE, INTEGER = torch.ones(3, 3, dtype=torch.float64), torch.arange(9).reshape(3, 3)
SIGNED = torch.tensor([300.0, -300.0]).half()


def product(left, right):
    return torch.mm(torch.tensor([left]), torch.tensor([right]).T)


VALUES = {
    "overflow in the final rounding": (lambda: product([256.0], [256.0]), torch.inf),
    "no overflow": (lambda: product([255.0], [256.0]), 65280.0),
    "rounded to the largest": (lambda: product([1.0, 1.0], [65504.0, 15.0]), 65504.0),
    "rounded past the largest": (lambda: product([1.0, 1.0], [65504.0, 16.0]), torch.inf),
    "a sum that passes 120000 on its way": (lambda: product([60000.0] * 4, [1.0, 1.0, -1.0, -0.5]), 30000.0),
    "a sum that stays at 2048 in fp16": (lambda: product([1.0] * 4097, [1.0] * 4097), 4096.0),
    "subnormals": (lambda: product([2.0**-24, 2.0**-26], [1.0, 1.0]), 2.0**-24),
    "an operand that rounds to Inf": (lambda: product([70000.0], [1.0]), torch.inf),
    "an operand that rounds": (lambda: product([2049.0], [1.0]), 2048.0),
    "into another tensor": (lambda: torch.mm(ONE * 1e3, ONE * 1e3, out=torch.empty(1, 1)), 1e6),
    "in place": (lambda: torch.empty(1, 1).addmm_(ONE * 1e3, ONE * 1e3, beta=0), 1e6),
    "square is a power": (lambda: HALF.square()[0], 90000.0),
    "a product is not": (lambda: (HALF * HALF)[0], torch.inf),
    "norm": (lambda: torch.linalg.norm(HALF), 600.0),
    "norm over a dimension": (lambda: torch.ops.aten.norm.ScalarOpt_dim(MATRIX, 2, [1])[0], 424.26407),
    "norm of an order": (lambda: torch.ops.aten.norm.Scalar(MATRIX, 1), 1200.0),
    "a spectrum": (lambda: torch.fft.rfft(torch.full((16,), 60000.0).half())[0].real, torch.inf),
    "an average in 3d": (lambda: F.avg_pool3d(torch.full((1, 1, 2, 2, 2), 6e4).half(), 2), 6e4),
    "an adaptive average": (lambda: F.adaptive_avg_pool3d(torch.full((1, 1, 4, 4, 4), 6e4).half(), 1), 6e4),
    "logit with an eps": (lambda: torch.logit(torch.ones(1).half(), 1e-6), 13.8046875),
    "logit without one": (lambda: torch.logit(torch.ones(1).half()), torch.inf),
    "dot": (lambda: torch.dot(HALF[:2], SIGNED), 0.0),
    "addcmul": (lambda: torch.addcmul(HALF, HALF, HALF, value=0.01)[0], 1200.0),
    "grid_sample": (
        lambda: F.grid_sample(torch.full((1, 1, 4, 4), 6e4).half(), torch.zeros(1, 1, 1, 2).half(), align_corners=True),
        60000.0,
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_numbers_are_rounded_where_cuda_rounds_them(name):
    make, expected = VALUES[name]
    with cuda_autocast():
        assert make().item() == pytest.approx(expected, rel=1e-6)


DTYPES = {
    "cross_entropy": (lambda: F.cross_entropy(HALF[None], torch.tensor([0])), torch.float32),
    "normalize": (lambda: F.normalize(HALF, dim=0), torch.float32),
    "softmax": (lambda: F.softmax(HALF, 0), torch.float32),
    "softmax in fp64": (lambda: F.softmax(HALF, 0, dtype=torch.float64), torch.float64),
    "softmax in fp16": (lambda: torch.softmax(HALF, 0, torch.float16), torch.float16),
    "sum in fp16": (lambda: HALF.sum(dtype=torch.float16), torch.float16),
    "interpolate": (lambda: F.interpolate(HALF[None, None], scale_factor=2.0), torch.float32),
    "mean": (HALF.mean, torch.float16),
    "gelu": (lambda: F.gelu(HALF), torch.float16),
    "dot": (lambda: torch.dot(HALF[:2], SIGNED), torch.float16),
    "dot of two formats": (lambda: torch.dot(HALF[:2].float(), SIGNED), torch.float32),
    "product in fp64": (lambda: DOUBLE @ DOUBLE, torch.float64),
    "exp in fp64": (lambda: torch.exp(DOUBLE), torch.float64),
    "sum of fp64": (DOUBLE.sum, torch.float64),
    "norm in fp64": (DOUBLE.norm, torch.float64),
    "product of integers": (lambda: INTEGER @ INTEGER, torch.int64),
    "sum of integers": (INTEGER.sum, torch.int64),
    "einsum of integers": (lambda: torch.einsum("ij,jk->ik", INTEGER, INTEGER), torch.int64),
    "complex product": (lambda: DOUBLE.to(torch.complex64) @ DOUBLE.to(torch.complex64), torch.complex64),
}


@pytest.mark.parametrize("name", DTYPES)
def test_the_format_of_a_result(name):
    make, expected = DTYPES[name]
    with cuda_autocast():
        assert make().dtype is expected


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: F.linear(DOUBLE, torch.randn(3, 3)), "same dtype"),
        (lambda: torch.dot(torch.ones(2).half(), torch.ones(2).bfloat16()), "prioritize"),
    ],
)
def test_formats_that_autocast_does_not_mix(call, match):
    with cuda_autocast(), pytest.raises(RuntimeError, match=match):
        call()


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), "left"),
        (torch.chain_matmul, "left"),
        (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), "left"),
        (lambda a, b, c: a @ b @ c, "left"),
        (lambda a, b, c: a @ (b @ c), "right"),
    ],
    ids=["einsum", "chain_matmul", "multi_dot", "matmul", "matmul from the right"],
)
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
def test_each_product_of_a_chain_is_rounded(chain, expected):
    a, b, c = torch.full((2, 8), 100.0), torch.full((8, 8), 100.0), torch.full((8, 8), 1e-4)
    with cuda_autocast():
        y = chain(a, b, c)
    assert y.dtype is torch.float16
    assert y.isinf().all() == (expected == "left")
    if expected == "right":
        assert torch.equal(y, (rounded(a) @ rounded(rounded(b) @ rounded(c))).half())


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(3, 4), (4, 5)]),
        ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("ii->i", [(3, 3)]),
        ("ij->", [(3, 4)]),
        ("i,j->ij", [(3,), (4,)]),
        ("...c,cd->...d", [(2, 3, 4), (4, 5)]),
    ],
)
def test_einsum(equation, shapes):
    operands = [torch.randn(shape) for shape in shapes]
    expected = torch.einsum(equation, *map(rounded, operands)).half()
    with cuda_autocast():
        assert torch.equal(torch.einsum(equation, *operands), expected)
    with apply_policy(REFERENCE, CPU):
        reference = torch.einsum(equation, *operands)
    assert torch.equal(reference, torch.einsum(equation, *operands))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool3d(x, 2),
        lambda x: F.rrelu(x, training=False),
        lambda x: torch.polar(x, x),
        torch.fft.rfft2,
        lambda x: torch.stft(x.flatten(), 16, window=torch.ones(16).to(x.dtype), return_complex=True),
    ],
    ids=["avg_pool3d", "rrelu", "polar", "rfft2", "stft"],
)
@pytest.mark.parametrize("policy", [Policy(name="cuda", format=FP16), REFERENCE], ids=["cuda", "reference"])
def test_half_precision_that_a_cpu_has_no_kernels_for(function, policy):
    x = torch.randn(1, 2, 4, 4, 4).half().requires_grad_()
    with apply_policy(policy, CPU):
        y = function(x)
    expected = function(x.detach().float())
    if y.is_complex():
        expected, y = torch.view_as_real(expected), torch.view_as_real(y)
        assert torch.equal(y, rounded(expected))
    else:
        assert torch.equal(y, expected.half())
    y.sum().backward()
    assert x.grad.dtype is torch.float16


@pytest.mark.parametrize("masked", ["no mask", "bool", "float", "causal"])
def test_attention_keeps_its_scores_in_fp32(masked):
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    q, k = q * 500, k * 500  # scores past 65504
    mask = {"bool": torch.ones(5, 5, dtype=torch.bool).tril(), "float": torch.randn(5, 5)}.get(masked)
    causal = masked == "causal"
    assert (rounded(q) @ rounded(k).mT).abs().max() > 65504
    cast_mask = rounded(mask) if masked == "float" else mask
    expected = F.scaled_dot_product_attention(*map(rounded, (q, k, v)), cast_mask, is_causal=causal).half()
    with cuda_autocast():
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    assert torch.equal(y, expected)
    assert y.isfinite().all()


@LOW
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True], ids=["tensor", "packed"])
def test_rnn_modules_run_in_fp16_as_cudnn_does(kind, packed, dtype):
    module, x = kind(6, 5, num_layers=2, bidirectional=True), torch.randn(7, 3, 6)
    given = nn.utils.rnn.pack_padded_sequence(x, [7, 5, 2]) if packed else x
    with cuda_autocast(dtype):
        y, hidden = module(given)
    hiddens = hidden if isinstance(hidden, tuple) else (hidden,)
    assert {t.dtype for t in (y.data, *hiddens)} == {torch.float16}
    torch.testing.assert_close(y.data.float(), module(given)[0].data, rtol=0, atol=2e-3)
    with apply_policy(REFERENCE, CPU):
        reference = module(given)[0].data
    assert torch.equal(reference, module(given)[0].data)


def test_uses_of_one_rnn_sum_their_gradients_in_fp32():
    module = nn.RNN(1, 1, nonlinearity="relu", bias=False)
    nn.init.ones_(module.weight_ih_l0)
    with cuda_autocast():
        uses = [module(torch.full((1, 1), 60000.0))[0] for _ in range(2)]
    sum(use.float() for use in uses).sum().backward()
    assert module.weight_ih_l0.grad.item() == 120000.0


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_gradients_are_rounded_where_cuda_rounds_them(inside):
    x, w = torch.randn(3, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    upstream = torch.randn(3, 4).half()
    with cuda_autocast():
        y = F.linear(x, w)
        if inside:
            y.backward(upstream)
    if not inside:
        y.backward(upstream)
    assert x.grad.dtype is w.grad.dtype is torch.float32
    assert torch.equal(x.grad, rounded(upstream.float() @ rounded(w)))
    assert torch.equal(w.grad, rounded(upstream.float().T @ rounded(x)))


def test_uses_of_one_weight_sum_their_gradients_in_fp16():
    """CUDA's autocast keeps one cast of each weight, so the sum of the uses' gradients can overflow."""
    for is_kept, gradient in ((True, torch.inf), (False, 120000.0)):
        w = torch.ones(1, 1, requires_grad=True)
        with cuda_autocast(), torch.autocast("cuda", cache_enabled=is_kept):
            uses = [F.linear(torch.full((1, 1), 60000.0), w) for _ in range(2)]
        sum(use.float() for use in uses).sum().backward()
        assert w.grad.item() == gradient


def test_a_weight_that_changed_is_cast_again():
    module = nn.Linear(1, 1, bias=False)
    with cuda_autocast():
        module(torch.ones(1, 1))
        with torch.no_grad():
            module.weight.fill_(3.0)
        assert module(torch.ones(1, 1)).item() == 3.0


def test_no_grad_does_not_spoil_the_gradient_of_a_later_use():
    module = nn.Linear(2, 2)
    with cuda_autocast():
        with torch.no_grad():
            module(torch.ones(1, 2))
        module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is not None


def test_reference_takes_mixed_dtypes_and_rounds_nothing():
    module, x = nn.Linear(6, 5), torch.randn(3, 6) * 1e5
    with apply_policy(REFERENCE, CPU):
        y = module(x)
        assert torch.equal(module(x.bfloat16()), module(x.bfloat16().float()))
        assert torch.softmax(x.bfloat16(), 0).dtype is torch.float32
    assert y.dtype is torch.float32
    assert torch.equal(y, module(x))
