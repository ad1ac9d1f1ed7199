"""The logarithm is taken of a probability that is at least 1e-6."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        p = torch.softmax(self.head(x).float(), dim=-1)
        return -torch.log(p.clamp(min=1e-6))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": 400 * torch.randn(8, 4)}, "step.pth")
