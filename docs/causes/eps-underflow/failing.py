"""1e-8 is 0 in fp16, so it does not keep a blank sample from 0 / 0."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 64, bias=False)

    def forward(self, x):
        x = self.embed(x)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-8)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(4, 12)
    x[2] = 0
    torch.save({"state_dict": Net().state_dict(), "x": x}, "step.pth")
