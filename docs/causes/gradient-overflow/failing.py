"""The gradient of a loss that is a sum of squares of thousands passes 65,504 at every loss scale."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x)


def loss(output, batch):
    return (100 * (output.float() - batch["target"])).square().sum()


if __name__ == "__main__":
    torch.manual_seed(0)
    x, target = torch.randn(4, 8), 1000 * torch.rand(4, 3)
    torch.save({"state_dict": Net().state_dict(), "x": x, "target": target}, "step.pth")
