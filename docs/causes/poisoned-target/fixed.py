"""Targets that were not measured are left out of the loss by selection."""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(x)


def loss(output, batch):
    known = ~batch["target"].isnan()
    return F.mse_loss(output[known], batch["target"][known])


if __name__ == "__main__":
    torch.manual_seed(0)
    target = torch.rand(4, 1)
    target[2] = float("nan")  # not measured
    torch.save({"state_dict": Net().state_dict(), "x": torch.randn(4, 8), "target": target}, "step.pth")
