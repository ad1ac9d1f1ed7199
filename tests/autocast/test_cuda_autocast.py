"""`cuda_autocast` as loops use it: as a context, nested as a decorator, and around checkpoints."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nandoctor
from nandoctor.autocast.kernels import is_emulating


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert not is_emulating("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert product() is torch.float32


def test_as_decorator():
    @nandoctor.cuda_autocast()
    def step(depth):
        return [product(), *(step(depth - 1) if depth else [])]

    assert step(2) == [torch.float16] * 3


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
        checkpoint(block, torch.full((2, 4), 8.0, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert ran == [(torch.float32, dtype, dtype)] * 2
    assert second.weight.grad.isfinite().all()
    assert not torch.is_autocast_enabled("cpu")
