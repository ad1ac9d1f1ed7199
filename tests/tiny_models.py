"""Tiny models that the tests share: each does one thing that a tracer, a runner or a replay must take."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


@dataclass
class Prediction:
    logit: torch.Tensor
    hidden: list[torch.Tensor]
    name: str = "prediction"


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, *args, **kwargs):
        return self.make(*args, **kwargs)


class Chain(nn.Module):
    """Calls its children by name, one after the other, more than once where `order` repeats a name."""

    def __init__(self, *order, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.order = order or tuple(children)

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


class Recursive(nn.Module):
    def forward(self, x, depth):
        return x if depth == 0 else self(x / 2, depth - 1)


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("refused")


class FallsBack(nn.Module):
    """Catches what its first child raises, and calls the second, while handling the exception and after."""

    def __init__(self):
        super().__init__()
        self.first = Chain(inner=Raises())
        self.second = nn.ReLU()

    def forward(self, x):
        try:
            x = self.first(x)
        except ValueError:
            x = self.second(x)
        return self.second(x)


class Eye(nn.Module):
    """A linear layer that gives `gain` times its input; a model that extends it says what it makes of that."""

    width, gain = 2, 1.0

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(self.width, self.width, bias=False)
        nn.init.eye_(self.read.weight).data.mul_(self.gain)


class Overflowing(nn.Module):
    """A linear layer whose product passes 65504 for inputs of ones, then a norm that makes NaN of the infinity."""

    def __init__(self, width=4, weight=30000.0):
        super().__init__()
        self.scale = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        nn.init.constant_(self.scale.weight, weight)

    def forward(self, image):
        return {"logit": self.norm(self.scale(image))}


class Drops(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, width)

    def forward(self, image):
        return self.head(self.dropout(image))


class Counts(nn.Module):
    """Writes two buffers on each call: one in place, one by putting a new tensor in its stead."""

    def __init__(self):
        super().__init__()
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, image):
        self.in_place += 1
        self.replaced = self.replaced + 1
        return image + self.in_place + self.replaced
