"""The product is computed in fp32."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand = nn.Linear(16, 16)

    def forward(self, x):
        y = self.expand(x).float()
        return y * y


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": 400 * torch.randn(4, 16)}, "step.pth")
