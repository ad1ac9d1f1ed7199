"""What the strangers have in common: numbers to feed them, and layers around them."""

from sick_models.case import randn, scaled
from torch import nn

normal, louder = randn, scaled


class Between(nn.Module):
    def __init__(self, middle, width=8):
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.middle = middle
        self.exit = nn.Linear(width, 2)

    def forward(self, x):
        return self.exit(self.middle(self.entry(x)))


class Lifted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.lift(x), x)


def mean(output, _batch):
    return output.float().mean()


def mean_square(output, _batch):
    return output.float().square().mean()
