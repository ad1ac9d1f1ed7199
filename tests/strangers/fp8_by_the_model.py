"""Modules that compute in fp8 by themselves: they are run as they are, and the report says what that means."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_map

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
BATCH = {"x": normal(4, 8)}


class Scaled(torch.Tensor):
    """fp8 numbers with a scale, as a tensor class of its own that answers each operation by itself."""

    @staticmethod
    def __new__(cls, data, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data8, made.scale = data, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        def widen(value):
            return value.data8.float() / value.scale if isinstance(value, Scaled) else value

        return op(*tree_map(widen, args), **tree_map(widen, kwargs or {}))


class Float8Linear(nn.Linear):
    """A linear layer whose operands are rounded to fp8."""

    def forward(self, x):
        scale = 400 / x.detach().abs().max()
        x8 = Scaled((x.float() * scale).to(torch.float8_e4m3fn), scale)
        return nn.functional.linear(x8, self.weight.to(torch.float8_e5m2).float(), self.bias)


TOLD = {"never": ("INTERNAL ASSERT",)}


@rows("healthy", BATCH, 1.0, **TOLD)
@rows("precision", BATCH, 1e6, **TOLD)
class Net(nn.Module):
    """Two layers, of which one is in fp8, with an overflow after them if it is sick."""

    def __init__(self, scale):
        super().__init__()
        self.first, self.second, self.scale = Float8Linear(8, 8), nn.Linear(8, 8), scale

    def forward(self, x):
        return self.second(self.first(x)) * self.scale


@rows("*", BATCH, 1.0, never=("in fp8-e5m2 (first: ",))
@rows("*", BATCH, 1e6, says=("in fp8-e5m2 (first: ",))
class Quantized(nn.Module):
    """Casts to fp8 in its own forward, without a module or a class that says so: a matter of bits, and told as that."""

    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x):
        return (self.linear(x).float() * self.scale).to(torch.float8_e5m2).float()
