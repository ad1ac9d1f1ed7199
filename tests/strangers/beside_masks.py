"""Infinities that an op makes of finite values while others, of a mask, pass through it."""

import math

import torch

from strangers.rows import Rows

rows = Rows()
BATCH = {"x": torch.tensor([[1.0, 2.0, 3.0], [0.5, 2.0, 1.0]])}


def masked(x):
    return x.masked_fill(torch.tensor([False, False, True]), -math.inf)


@rows.applied("* * sqrt invalid-domain", BATCH)
def below_zero(x):
    return torch.sqrt((x - 2).masked_fill(x > 2, math.inf)).clamp(max=9)


@rows.applied("* * exp exp-overflow", BATCH)
def beyond_float64(x):
    return torch.exp(masked(x) * 400).sum(-1)


@rows.applied("* * exp2 exp-overflow", BATCH)
def beyond_float64_in_base_2(x):
    return torch.exp2(masked(x) * 600).sum(-1)


@rows.applied("* * div division-by-zero", BATCH)
def divisor_of_zero(x):
    return (masked(x) / (x - x[:1])).softmax(-1)


@rows.applied("* * atanh invalid-domain", BATCH)
def out_of_the_domain(x):
    return masked(x) * torch.atanh(masked(x).exp() / math.e**2)
