"""The squares are computed in fp32."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)

    def forward(self, x):
        x = self.embed(x).float()
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": 800 * torch.randn(4, 8)}, "step.pth")
