"""Emulated low-precision arithmetic: what is rounded, where, and what the gradients see."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nandoctor.autocast.policy import REFERENCE, Policy, apply_policy, cuda_autocast
from nandoctor.evidence.formats import FP16

CPU = torch.device("cpu")
LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def rounded(tensor, dtype=torch.float16):
    return tensor.to(dtype).float()


def test_overflow_happens_in_the_final_rounding():
    x = torch.tensor([[256.0, 0.0], [255.0, 0.0]])
    w = torch.tensor([[256.0, 0.0]])
    with cuda_autocast():
        y = F.linear(x, w)
    assert y.tolist() == [[torch.inf], [65280.0]]
    assert F.linear(x, w).tolist() == [[65536.0], [65280.0]]


@pytest.mark.parametrize(("product", "expected"), [(65519.0, 65504.0), (65520.0, torch.inf)])
def test_values_round_to_the_largest_fp16_or_past_it(product, expected):
    with cuda_autocast():
        y = torch.mm(torch.ones(1, 2), torch.tensor([[65504.0], [product - 65504.0]]))
    assert y.item() == expected


def test_the_sum_is_kept_in_fp32():
    x = torch.full((1, 4), 60000.0)
    w = torch.tensor([[1.0, 1.0, -1.0, -0.5]])
    with cuda_autocast():
        assert F.linear(x, w).item() == 30000.0  # the sum passes 120000 on its way


def test_small_addends_are_not_lost_in_the_sum():
    x = torch.ones(1, 4097)
    with cuda_autocast():
        y = torch.mm(x, x.T)
    assert y.item() == 4096.0  # 4097 rounded once; a sum in fp16 stays at 2048


def test_subnormals_are_kept():
    smallest = 2.0**-24
    with cuda_autocast():
        y = torch.mm(torch.tensor([[smallest, 2.0**-26]]), torch.tensor([[1.0], [1.0]]))
    assert y.item() == smallest


def test_operands_are_rounded_before_the_product():
    x = torch.tensor([[70000.0, 2049.0]])
    with cuda_autocast():
        assert torch.mm(x, torch.tensor([[0.0], [1.0]])).isnan().all()  # inf * 0
        assert torch.mm(x[:, 1:], torch.ones(1, 1)).item() == 2048.0


@LOW
@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(6, 5),
        nn.Conv1d(6, 4, 3),
        nn.Conv2d(6, 4, 3, padding="same"),
        nn.Conv3d(6, 4, 1),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.PReLU(6),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_match_rounded_operands(module, dtype):
    sizes = {nn.Linear: (3, 6), nn.Conv1d: (2, 6, 7), nn.Conv3d: (2, 6, 3, 3, 3)}
    x = torch.randn(sizes.get(type(module), (2, 6, 7, 7)))
    parameters = {name: rounded(p, dtype) for name, p in module.named_parameters()}
    with cuda_autocast(dtype):
        y = module(x)
    assert y.dtype is dtype
    assert torch.equal(y, torch.func.functional_call(module, parameters, rounded(x, dtype)).to(dtype))


def test_low_precision_inputs_are_taken_as_they_are():
    module, x = nn.Linear(6, 5), torch.randn(3, 6)
    with cuda_autocast():
        assert torch.equal(module(x), module(x.half()))
        assert torch.equal(module(x.bfloat16()), module(x.bfloat16().float()))


def test_doubles_integers_and_complex_numbers_are_left_alone():
    double, integer = torch.randn(3, 3, dtype=torch.float64), torch.arange(9).reshape(3, 3)
    with cuda_autocast():
        assert torch.equal(double @ double, torch.mm(double, double))
        assert (double @ double).dtype is torch.float64
        assert torch.exp(double).dtype is torch.float64
        assert double.sum().dtype is torch.float64
        assert double.norm().dtype is torch.float64
        assert (integer @ integer).dtype is torch.int64
        assert integer.sum().dtype is torch.int64
        assert torch.einsum("ij,jk->ik", integer, integer).dtype is torch.int64
        assert (double.to(torch.complex64) @ double.to(torch.complex64)).dtype is torch.complex64
        with pytest.raises(RuntimeError, match="same dtype"):
            F.linear(double, torch.randn(3, 3))
        with pytest.raises(RuntimeError, match=r"prioritize"):
            torch.dot(torch.ones(2).half(), torch.ones(2).bfloat16())


def test_out_variants_are_not_autocast():
    a, out = torch.full((1, 1), 1000.0), torch.empty(1, 1)
    with cuda_autocast():
        torch.mm(a, a, out=out)
        assert out.item() == 1e6
        assert torch.empty(1, 1).addmm_(a, a, beta=0).item() == 1e6


def test_composites_meet_the_list_inside():
    half = torch.full((4,), 300.0, dtype=torch.float16)
    with cuda_autocast():
        assert half.square().tolist() == [90000.0] * 4
        assert (half * half).tolist() == [torch.inf] * 4
        assert F.cross_entropy(half[None], torch.tensor([0])).dtype is torch.float32
        assert F.normalize(half, dim=0).dtype is torch.float32
        assert torch.linalg.norm(half).item() == 600.0
        assert F.softmax(half, 0).dtype is torch.float32
        assert F.softmax(half, 0, dtype=torch.float64).dtype is torch.float64
        assert torch.softmax(half, 0, torch.float16).dtype is torch.float16
        assert half.sum(dtype=torch.float16).dtype is torch.float16
        assert F.interpolate(half[None, None], scale_factor=2.0).dtype is torch.float32
        assert half.mean().dtype is torch.float16
        assert F.gelu(half).dtype is torch.float16


def test_norm_with_dimensions():
    half = torch.full((2, 2), 300.0, dtype=torch.float16)
    with cuda_autocast():
        norm = torch.ops.aten.norm
        assert torch.equal(norm.ScalarOpt_dim(half, 2, [1]), torch.full((2,), 300.0 * 2**0.5))
        assert norm.ScalarOpt_dim(half, None, [1], True).shape == (2, 1)
        assert norm.Scalar(half).item() == 600.0
        assert norm.Scalar(half, 1).item() == 1200.0


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


def test_half_precision_overflows_where_a_cpu_has_no_kernels():
    with cuda_autocast():
        spectrum = torch.fft.rfft(torch.full((16,), 60000.0).half())
        assert spectrum[0].real.item() == torch.inf
        assert F.avg_pool3d(torch.full((1, 1, 2, 2, 2), 60000.0).half(), 2).item() == 60000.0


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


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_rnn_cells(kind):
    module, x = kind(6, 5), torch.randn(3, 6)
    with cuda_autocast():
        y = module(x)
        again = module(x, y)
    for state in (y, again):
        assert {t.dtype for t in (state if isinstance(state, tuple) else (state,))} == {torch.float16}


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_runs_its_products_in_fp16(training):
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).train(training), torch.randn(2, 5, 8)
    with torch.set_grad_enabled(training), cuda_autocast():
        y, weights = module(x, x, x)
    assert y.dtype is torch.float16
    assert weights.dtype is torch.float32  # softmax
    torch.testing.assert_close(y.float(), module(x, x, x)[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("policy", [Policy(name="cuda", format=FP16), REFERENCE], ids=["cuda", "reference"])
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_takes_no_fast_path(policy, training, monkeypatch):
    def fast_path(*args, **kwargs):
        raise AssertionError("autocast turns the fast path off")

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fast_path)
    monkeypatch.setattr(torch, "_native_multi_head_attention", fast_path)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training), torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), apply_policy(policy, CPU):
        y = module(x, src_key_padding_mask=padding)
    assert y.dtype is torch.float32  # ends in layer_norm
    assert y.isfinite().all()


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


def test_gradients_overflow_in_fp16():
    w = torch.full((1, 1), 300.0, requires_grad=True)
    x = torch.full((1, 1), 2.0, requires_grad=True)
    with cuda_autocast():
        y = F.linear(x, w)
    y.backward(torch.full((1, 1), 300.0, dtype=torch.float16))
    assert w.grad.item() == 600.0
    assert x.grad.item() == torch.inf


def test_uses_of_one_weight_sum_their_gradients_in_fp16():
    """CUDA's autocast keeps one cast of each weight, so the sum of the uses' gradients can overflow."""
    w = torch.ones(1, 1, requires_grad=True)
    with cuda_autocast():
        uses = [F.linear(torch.full((1, 1), 60000.0), w) for _ in range(2)]
    sum(use.float() for use in uses).sum().backward()
    assert w.grad.item() == torch.inf
    w.grad = None
    with cuda_autocast(), torch.autocast("cuda", cache_enabled=False):
        uses = [F.linear(torch.full((1, 1), 60000.0), w) for _ in range(2)]
    sum(use.float() for use in uses).sum().backward()
    assert w.grad.item() == 120000.0


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    module, x = nn.Linear(6, 5), torch.randn(2, 3, 6)
    with cuda_autocast():
        expected = module(x)
        with mode():
            y = module(x)
    assert not y.requires_grad
    assert torch.equal(y, expected)


def test_double_backward():
    x = torch.randn(2, 3, requires_grad=True)
    w = torch.randn(3, 3, requires_grad=True)
    with cuda_autocast():
        y = torch.mm(x, w).float().pow(2).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.pow(2).sum(), w)
    exact = torch.mm(x, w).pow(2).sum()
    (exact_gradient,) = torch.autograd.grad(exact, x, create_graph=True)
    (exact_second,) = torch.autograd.grad(exact_gradient.pow(2).sum(), w)
    torch.testing.assert_close(second, exact_second, rtol=1e-2, atol=1e-1)


def test_reference_takes_mixed_dtypes_and_rounds_nothing():
    module, x = nn.Linear(6, 5), torch.randn(3, 6) * 1e5
    with apply_policy(REFERENCE, CPU):
        y = module(x)
        assert torch.equal(module(x.bfloat16()), module(x.bfloat16().float()))
        assert torch.softmax(x.bfloat16(), 0).dtype is torch.float32
    assert y.dtype is torch.float32
    assert torch.equal(y, module(x))


def test_logit_takes_an_eps_that_its_format_rounds_away():
    p = torch.tensor([0.0, 0.5, 1.0]).half()
    with cuda_autocast():
        assert torch.logit(p, 1e-6).tolist() == pytest.approx([-13.81, 0.0, 13.81], abs=0.05)
        assert torch.logit(p).tolist() == [-torch.inf, 0.0, torch.inf]


def test_a_pooled_sum_may_pass_the_limit_that_its_mean_does_not():
    x = torch.full((1, 1, 4, 4, 4), 60000.0).half()
    with cuda_autocast():
        assert F.adaptive_avg_pool3d(x, 1).item() == F.adaptive_avg_pool2d(x[0], 1)[0, 0, 0, 0].item() == 60000.0


def test_promoted_ops_round_half_operands_once():
    a, b = torch.full((2,), 300.0).half(), torch.tensor([300.0, -300.0]).half()
    image, places = torch.full((1, 1, 4, 4), 6e4).half(), torch.zeros(1, 1, 1, 2).half()
    with cuda_autocast():
        assert torch.dot(a, b).item() == 0.0
        assert torch.addcmul(a, a, a, value=0.01).tolist() == [1200.0, 1200.0]
        assert F.grid_sample(image, places, align_corners=True).item() == 60000.0
        assert torch.dot(a, b).dtype is torch.float16
        assert torch.dot(a.float(), b).dtype is torch.float32
