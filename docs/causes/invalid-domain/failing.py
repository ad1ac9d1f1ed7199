"""A Linear gives negative numbers as well, and their logarithm is NaN."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.spread = nn.Linear(8, 3)

    def forward(self, x):
        return torch.log(self.spread(x))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": torch.randn(4, 8)}, "step.pth")
