"""The scores of an attention without a scale pass what fp16 holds."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        q, k = self.query(x), self.key(x)
        return torch.softmax(q @ k.transpose(-2, -1) / 8, dim=-1)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": 130 * torch.randn(2, 10, 64)}, "step.pth")
