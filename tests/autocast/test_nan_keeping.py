"""Attention and convolutions on a CPU hand every NaN on, and are the fused kernels' where there is none."""

import pytest
import torch
import torch.nn.functional as F
from one_test import for_each
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from nandoctor.autocast.nan_keeping import keep_nonfinite
from nandoctor.autocast.policy import EXACT, REFERENCE, Policy, apply_policy, cuda_autocast
from nandoctor.evidence.formats import BF16, FP16

CPU = torch.device("cpu")
POLICIES = [
    Policy(name="cuda", format=FP16),
    Policy(name="cuda", format=BF16),
    Policy(name="cuda", format=FP16, ambient=False),
    REFERENCE,
    EXACT,
]
SIZES = [(4, 8), (40, 8), (300, 16)]  # of the sequence and of a head: the fused kernel has a tail for each


def by_reference_math(*operands, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(operand.double() for operand in operands), **options)


@for_each(POLICIES, [0, 1, 2], SIZES, [False, True])
def test_a_nan_in_any_operand_reaches_the_output(policy, which, size, causal):
    torch.manual_seed(0)
    operands = [torch.randn(2, 2, *size, dtype=torch.float64 if policy is EXACT else torch.float32) for _ in range(3)]
    operands[which][0, 0, 0, 0] = torch.nan
    with apply_policy(policy, CPU):
        made = F.scaled_dot_product_attention(*operands, is_causal=causal)
    assert torch.equal(made.isnan(), by_reference_math(*operands, is_causal=causal).isnan())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_an_infinity_in_any_operand_reaches_the_output(value, which):
    torch.manual_seed(0)
    operands = [torch.randn(1, 2, 40, 8) for _ in range(3)]
    operands[which][0, 1, 3, 2] = value
    with cuda_autocast():
        made = F.scaled_dot_product_attention(*operands)
    assert torch.equal(made.isfinite(), by_reference_math(*operands).isfinite())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modules_with_attention_inside_hand_nan_on(mode):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    with torch.no_grad():
        layer.self_attn.in_proj_weight[0, 0] = torch.nan
    with mode(), cuda_autocast():
        assert layer(torch.randn(2, 5, 16)).isnan().all()


def test_finite_operands_give_the_bits_of_the_fused_kernel():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 40, 8).half().float() for _ in range(3))
    fused = F.scaled_dot_product_attention(query, key, value)
    with apply_policy(REFERENCE, CPU):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), fused)
    with cuda_autocast():
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), fused.half())


def test_gradients_are_those_of_the_reference_math():
    torch.manual_seed(0)
    operands = [torch.randn(1, 1, 6, 4, requires_grad=True) for _ in range(3)]
    with torch.no_grad():
        operands[0][0, 0, 2, 1] = torch.nan
    with apply_policy(REFERENCE, CPU):
        made = torch.autograd.grad(F.scaled_dot_product_attention(*operands).sum(), operands)
    expected = torch.autograd.grad(by_reference_math(*operands).sum(), operands)
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(made, expected, strict=True))


def test_a_row_that_is_masked_entirely_stays_zero():
    operands = [torch.randn(1, 1, 3, 4) for _ in range(3)]
    mask = torch.tensor([[False] * 3, [True] * 3, [True] * 3])
    with cuda_autocast():
        assert not F.scaled_dot_product_attention(*operands, attn_mask=mask)[0, 0, 0].any()
        operands[0][0, 0, 1, 0] = torch.nan
        made = F.scaled_dot_product_attention(*operands, attn_mask=mask)
    assert made.isnan().any(-1).tolist() == [[[False, True, False]]]


def test_torch_is_as_it_was_afterwards():
    query = torch.full((1, 1, 4, 8), torch.nan)
    before = F.scaled_dot_product_attention(query, query, query).isnan().any()
    with cuda_autocast():
        F.scaled_dot_product_attention(query, query, query)
        assert torch.backends.cuda.flash_sdp_enabled()
    assert F.scaled_dot_product_attention(query, query, query).isnan().any() == before


def test_a_model_under_vmap_and_in_a_graph_still_runs():
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(3, 1, 4, 8)
    x[1, 0, 0, 0] = torch.nan
    with apply_policy(REFERENCE, CPU):
        made = torch.vmap(attend)(x)
    assert made.isnan().flatten(1).any(1).tolist() == [False, True, False]


PER_SAMPLE = {
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x).square().sum(), (3, 1, 2, 4, 8)),
    "weights of convolutions": (lambda w: F.conv2d(torch.ones(1, 2, 5, 5), w).square().sum(), (3, 4, 2, 3, 3)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", PER_SAMPLE)
def test_gradients_of_each_sample_are_as_without(kind):
    function, shape = PER_SAMPLE[kind]
    torch.manual_seed(0)
    values = torch.randn(shape)
    gradients = torch.vmap(torch.func.grad(function))
    usual = gradients(values)
    with keep_nonfinite:
        assert torch.equal(gradients(values), usual)


def test_tensors_without_values_are_taken_as_finite():
    with keep_nonfinite, FakeTensorMode():
        x = torch.randn(1, 2, 4, 4)
        assert F.scaled_dot_product_attention(x, x, x).shape == x.shape
        assert F.conv2d(x, torch.randn(3, 2, 1, 1)).shape == (1, 3, 4, 4)


CONVOLUTIONS = {
    "1d": (F.conv1d, (4,)),
    "2d": (F.conv2d, (4, 5)),
    "3d": (F.conv3d, (3, 4, 2)),
    "one pixel": (F.conv2d, (1, 1)),
    "transposed": (F.conv_transpose2d, (3, 3)),
}


@for_each(CONVOLUTIONS, [torch.nan, torch.inf], POLICIES)
def test_a_weight_that_meets_padding_reaches_the_output(kind, value, policy):
    torch.manual_seed(0)
    convolve, size = CONVOLUTIONS[kind]
    dtype = torch.float64 if policy is EXACT else torch.float32
    image, weight = torch.randn(2, 4, *size, dtype=dtype), torch.randn(4, 4, *[3] * len(size), dtype=dtype)
    weight.view(-1)[0] = value
    expected = convolve(image.double(), weight.double(), padding=1)  # oneDNN has no double precision
    with apply_policy(policy, CPU):
        made = convolve(image, weight, padding=1)
    assert torch.equal(made.isfinite(), expected.isfinite())
    assert not made.isfinite().all()


def gradients(function, operands, place, value):
    """Where the gradients are finite, with one value put into an operand, or into the incoming gradient for None."""
    operands = [operand.clone() for operand in operands]
    if place is not None:
        operands[place].view(-1)[1] = value
    made = function(*(operand.requires_grad_() for operand in operands))
    incoming = torch.ones_like(made)
    if place is None:
        incoming.view(-1)[0] = value
    return [gradient.isfinite() for gradient in torch.autograd.grad(made, operands, incoming)]


IN_BACKWARD = {
    "strided": (lambda x, w: F.conv2d(x, w, padding=1, stride=2), (4, 4, 3, 3), (5, 6)),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (4, 1, 3, 3), (5, 6)),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, padding=1, stride=2), (4, 4, 3, 3), (5, 6)),
    "1d": (lambda x, w: F.conv1d(x, w, padding=1), (4, 4, 3), (7,)),
}


@for_each(IN_BACKWARD, [torch.nan, torch.inf], [0, 1, None])
def test_the_backward_of_a_convolution_leaves_no_product_out(kind, value, place):
    torch.manual_seed(0)
    function, shape, size = IN_BACKWARD[kind]
    operands = [torch.randn(2, 4, *size), torch.randn(shape)]
    expected = gradients(function, [operand.double() for operand in operands], place, value)
    for policy in POLICIES[:-1]:
        with apply_policy(policy, CPU):
            made = gradients(function, operands, place, value)
        assert all(map(torch.equal, made, expected))
        assert not all(gradient.all() for gradient in made)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_finite_convolution_is_that_of_the_cpu(groups):
    torch.manual_seed(0)
    convolution = nn.Conv2d(4, 8, 3, padding=1, stride=2, groups=groups)
    image = torch.randn(2, 4, 9, 9, requires_grad=True)
    taken = (image, convolution.weight, convolution.bias)
    expected = torch.autograd.grad(convolution(image).sum(), taken)
    with apply_policy(REFERENCE, CPU):
        made = torch.autograd.grad(convolution(image).sum(), taken)
    assert all(map(torch.equal, made, expected))
