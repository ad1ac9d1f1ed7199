"""One value of the batch is NaN before the model sees it."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    x[1, 6] = float("nan")  # not measured
    torch.save({"state_dict": Net().state_dict(), "x": x}, "step.pth")
