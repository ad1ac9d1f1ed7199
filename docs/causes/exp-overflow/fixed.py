"""F.softplus is the identity for large arguments."""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return F.softplus(self.head(x))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save({"state_dict": Net().state_dict(), "x": 300 * torch.randn(8, 4)}, "step.pth")
