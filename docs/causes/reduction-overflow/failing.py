"""The values are in the hundreds, and their variance passes 65,504: autocast runs `var` in fp16."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        x = self.mix(x)
        return x.var(dim=(2, 3))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": 800 * torch.randn(2, 3, 64, 64)}, "step.pth")
