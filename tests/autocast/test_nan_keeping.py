"""Attention on a CPU hands every NaN on, and is the fused kernel's where there is none."""

import pytest
import torch
import torch.nn.functional as F
from one_test import for_each
from torch.nn.attention import SDPBackend, sdpa_kernel

from nandoctor.autocast.kernels import keep_nonfinite
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
    operands = [torch.randn(2, 2, *size, dtype=torch.float64 if policy is EXACT else torch.float32) for _ in range(3)]
    operands[which][0, 0, 0, 0] = torch.nan
    with apply_policy(policy, CPU):
        made = F.scaled_dot_product_attention(*operands, is_causal=causal)
    assert torch.equal(made.isnan(), by_reference_math(*operands, is_causal=causal).isnan())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_an_infinity_in_any_operand_reaches_the_output(value, which):
    operands = [torch.randn(1, 2, 40, 8) for _ in range(3)]
    operands[which][0, 1, 3, 2] = value
    with cuda_autocast():
        made = F.scaled_dot_product_attention(*operands)
    assert torch.equal(made.isfinite(), by_reference_math(*operands).isfinite())


def test_finite_operands_give_the_bits_of_the_fused_kernel():
    query, key, value = (torch.randn(2, 2, 40, 8).half().float() for _ in range(3))
    fused = F.scaled_dot_product_attention(query, key, value)
    with apply_policy(REFERENCE, CPU):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), fused)
    with cuda_autocast():
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), fused.half())


def test_gradients_are_those_of_the_reference_math():
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


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sample_are_as_without():
    values = torch.randn(3, 1, 2, 4, 8)
    gradients = torch.vmap(torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).square().sum()))
    usual = gradients(values)
    with keep_nonfinite:
        assert torch.equal(gradients(values), usual)
