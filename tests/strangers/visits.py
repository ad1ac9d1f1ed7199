"""What the strangers have in common: numbers to feed them, and layers around them."""

import torch
from torch import nn


def normal(*shape):
    """Normal numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def louder(layer, factor):
    """The layer with its parameters multiplied."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(factor)
    return layer


class Between(nn.Module):
    """Two linear layers with anything between them."""

    def __init__(self, middle, width=8):
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.middle = middle
        self.exit = nn.Linear(width, 2)

    def forward(self, x):
        return self.exit(self.middle(self.entry(x)))


class Lifted(nn.Module):
    """A linear layer, and a function of its output and of the input."""

    def __init__(self, function):
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.lift(x), x)


def mean(output, _batch):
    """A loss in fp32."""
    return output.float().mean()


def mean_square(output, _batch):
    """Another one."""
    return output.float().square().mean()
