"""Writes that autograd does not count, tensors that lie in another's memory, and memory that is not filled yet."""

import math

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
BATCH = {"x": normal(4, 8)}


class Scaled(nn.Module):
    """A weight and a running average, read and written by way of `.data`."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("average", torch.ones(8))
        with torch.no_grad():
            self.scale[3] = scale


@rows.between("precision middle mul elementwise-overflow", BATCH, line="x.data[:, :4] *= 1e6")
def activation_that_is_written_to_through_data(x):
    x = x.clone()
    x.data[:, :4] *= 1e6
    return x


@rows("precision . mul elementwise-overflow", BATCH)
class RunningAverageThatIsWrittenToThroughData(Scaled):
    def forward(self, x):
        self.average.data.copy_(self.inner(x).mean(0) * 1e7)
        return self.inner(x + self.average)


@rows("state . - poisoned-weights", BATCH, math.nan)
class WeightThatIsReadThroughData(Scaled):
    def forward(self, x):
        return self.inner(x * self.scale.data)


@rows("healthy", BATCH, math.nan)
class WeightThatIsMendedThroughData(Scaled):
    def forward(self, x):
        self.scale.data.nan_to_num_(1.0)
        return self.inner(x * self.scale)


@rows.between("healthy", BATCH)
def scratch_tensor_that_is_filled_through_data(x):
    result = torch.empty_like(x).fill_(math.nan)
    result.data[:, :4] = x[:, :4]
    result.data[:, 4:] = x[:, 4:]
    return result


def only_nan(report):
    return report.origin.elements.kinds == ("nan",)


@rows("numerics .", BATCH, line="math.nan", holds=only_nan)
class ConstantOfTheCodesOwnThatIsNan(Scaled):
    def forward(self, x):
        return self.inner(x) * torch.tensor([1.0, math.nan] * 4)
