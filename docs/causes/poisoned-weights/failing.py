"""One weight of the checkpoint is NaN before the step begins."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.body.weight[3, 2] = float("nan")  # an earlier step wrote it
    torch.save({"state_dict": model.state_dict(), "x": torch.randn(4, 8)}, "step.pth")
