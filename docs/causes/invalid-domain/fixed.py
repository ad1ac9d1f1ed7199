"""The logarithm is taken of a softplus, which is above 0."""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.spread = nn.Linear(8, 3)

    def forward(self, x):
        return torch.log(F.softplus(self.spread(x)))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": torch.randn(4, 8)}, "step.pth")
