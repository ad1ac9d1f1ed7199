"""Extracting ops, slicing and writing, one by one."""

import math

import pytest
import torch

from nandoctor.repro_scripts.build import write_tensor
from nandoctor.repro_scripts.program import Program, Ref, find_failure, shrink

INF, NAN = float("inf"), float("nan")


def program(function, *leaves, mode="plain", others=(), **kwargs):
    """One op on leaves x, y, z and what else it takes."""
    named = dict(zip("xyz", leaves, strict=False))
    args = (*(Ref(name) for name in named), *others)
    return Program(function=function, mode=mode, args=args, kwargs=kwargs, leaves=named, low=torch.float16)


def half(*values):
    return torch.tensor(values, dtype=torch.float16)


def smallest(case):
    return shrink(case, find_failure(case))


def test_a_product_is_rounded_once_after_its_sum():
    x = torch.full((1, 300), 300.0)
    y = torch.cat([torch.ones(150), -torch.ones(150)]).unsqueeze(1)
    product = program("torch.matmul", x * 2, y, mode="product")
    assert product.run().tolist() == [[0.0]]  # 90000 on the way
    assert product.run().dtype == torch.float16
    assert product.run_in_fp32().dtype == torch.float32


def test_dimensions_that_belong_together_shrink_together():
    x, y = torch.rand(6, 12) + 1, torch.rand(12, 9) + 1
    y[:, 4] *= 60000
    found = smallest(program("torch.matmul", x, y, mode="product"))
    assert found.leaves["x"].shape[1] == found.leaves["y"].shape[0] <= 2
    assert (found.leaves["x"].shape[0], found.leaves["y"].shape[1]) == (1, 1)


def test_a_sum_keeps_as_many_terms_as_it_takes():
    found = smallest(program("torch.sum", torch.full((1000, 70), 1000.0, dtype=torch.float16), others=([1],)))
    assert found.leaves["x"].shape == (1, 66)
    assert found.leaves["x"].unique().tolist() == [1000.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_literal_gives_every_bit_again(dtype):
    finfo = torch.finfo(dtype)
    odd = [0.0, -0.0, 1 / 3, -math.pi, finfo.max, -finfo.tiny, finfo.tiny / 2, 1 + finfo.eps, INF, -INF, NAN]
    tensor = torch.tensor(odd, dtype=dtype)
    again = eval(write_tensor(tensor), {"torch": torch, "inf": INF, "nan": NAN})
    assert again.dtype == dtype
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("function", "x", "call"),
    [
        (lambda y: y.mul_(100), torch.full((2, 4), 1000.0), "torch.mul(x, 100)"),
        (lambda y: y.chunk(2, -1)[1] * 100, torch.full((2, 4), 1000.0), "torch.mul(x, 100)"),
        (lambda y: y.new_zeros(2, 4).copy_(y.float() * 100), torch.full((2, 4), 1000.0), ".clone().copy_(src)"),
        (lambda y: (y.float() * 100).half(), torch.full((2, 4), 1000.0), ".to(low)"),
        (lambda y: torch.var_mean(y, dim=-1)[0], 1e4 * torch.arange(4.0).expand(2, 4), "torch.var_mean("),
        (lambda y: torch.einsum("ij,kj->ik", y, y), torch.full((2, 4), 200.0), "torch.einsum('ij,kj->ik', ["),
        (lambda y: 1 / torch.maximum(y, torch.tensor(1e-9)), torch.zeros(2, 4), "torch.maximum(x, y)"),
        (lambda y: torch.cat([y, y]).sum(0).half() * 9, torch.full((2, 4), 9e3), "torch.mul(x, 9)"),
        (lambda y: torch.log(torch.fft.rfft(y).abs() * 0), torch.ones(2, 4), "torch.log(x.float())"),
    ],
)
def test_ops_of_every_shape_are_cut_out(function, x, call, script_of):
    assert call in script_of(function, x)


def test_gradients_of_an_op_that_wrote_in_place(script_of):
    script = script_of(lambda y: (y * 0).sqrt_(), torch.ones(2, 4), loss=lambda out, _: out.float().sum())
    assert "torch.autograd.grad" in script
    assert "in the gradients of torch.sqrt" in script


def test_inputs_that_were_rounded_before_are_told(script_of):
    script = script_of(lambda y: torch.sqrt(y * 0 + 1e-9), torch.ones(2, 4), loss=lambda out, _: out.float().sum())
    assert "# fp32 fails too" in script
    assert "rounded by earlier operations of the step" in script
