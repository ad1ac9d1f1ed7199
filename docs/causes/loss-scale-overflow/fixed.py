"""The loss scale starts lower."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x)


def loss(output, batch):
    return 10 * (output.float() - batch["target"]).abs().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    step = {"state_dict": Net().state_dict(), "x": 50 * torch.randn(4, 8), "target": torch.rand(4, 3)}
    torch.save({**step, "loss_scale": 64.0}, "step.pth")
