"""Autocast computes exp in fp32, which overflows past 88.7: a softplus written by hand."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return torch.log(1 + torch.exp(self.head(x)))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": 300 * torch.randn(8, 4)}, "step.pth")
