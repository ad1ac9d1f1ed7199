"""`cuda_autocast` as loops use it: made once, entered often, recomputed after it was left."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nandoctor
from nandoctor.autocast.kernels import is_emulating

LAYERS = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    gc.collect()
    assert not is_emulating("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert product() is torch.float32


def test_one_object_serves_a_whole_loop():
    context = nandoctor.cuda_autocast()
    for _ in range(3):
        with context:
            assert product() is torch.float16
        assert product() is torch.float32


def test_one_object_inside_itself():
    context = nandoctor.cuda_autocast(torch.bfloat16)
    with context, context:
        assert product() is torch.bfloat16


def test_as_decorator():
    @nandoctor.cuda_autocast()
    def step(depth):
        return [product(), *(step(depth - 1) if depth else [])]

    assert step(2) == [torch.float16] * 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_recompute_after_the_context(use_reentrant):
    """Under torch's own lists for CPUs layer_norm runs in fp16, and the recomputed tensors do not fit."""
    x = torch.randn(4, 8, requires_grad=True)
    with nandoctor.cuda_autocast():
        expected = LAYERS(x).float().square().sum()
    expected = torch.autograd.grad(expected, [x, *LAYERS.parameters()])
    with nandoctor.cuda_autocast():
        loss = checkpoint(LAYERS, x, use_reentrant=use_reentrant).float().square().sum()
    assert is_emulating("cpu")
    assert product() is torch.float32
    LAYERS.zero_grad()
    x.grad = None
    loss.backward()
    for tensor, gradient in zip([x, *LAYERS.parameters()], expected, strict=True):
        assert torch.equal(tensor.grad, gradient)
    del loss


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_regions_of_the_code_are_recomputed_as_they_ran(dtype, use_reentrant):
    """In fp16 what the first layer gives would be Inf, and the recomputed tensors would not fit."""
    first, second = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
    first.weight.data = torch.eye(4) * 3e4
    ran = []

    def block(x):
        with torch.autocast("cuda", enabled=False):
            wide = first(x.float())
            with torch.autocast("cuda"):
                low = second(wide / 1e4)
        ran.append((wide.dtype, low.dtype, second(x).dtype))
        return torch.tanh(wide) + low

    with nandoctor.cuda_autocast(dtype):
        loss = checkpoint(block, torch.full((2, 4), 8.0, requires_grad=True), use_reentrant=use_reentrant).sum()
    loss.backward()
    assert ran == [(torch.float32, dtype, dtype)] * 2
    assert second.weight.grad.isfinite().all()
    assert not torch.is_autocast_enabled("cpu")


def test_a_graph_that_is_dropped_frees_the_kernels():
    with nandoctor.cuda_autocast():
        loss = checkpoint(LAYERS, torch.randn(4, 8, requires_grad=True), use_reentrant=False).sum()
    assert is_emulating("cpu")
    del loss
    gc.collect()
    assert not is_emulating("cpu")


def test_checkpoints_elsewhere_hold_nothing():
    loss = checkpoint(LAYERS, torch.randn(4, 8, requires_grad=True), use_reentrant=False).sum()
    assert not is_emulating("cpu")
    loss.backward()
