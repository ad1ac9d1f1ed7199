"""A price in cents is past 65,504, and autocast casts the input of a Linear to fp16."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, cents):
        return self.head(cents)


if __name__ == "__main__":
    torch.manual_seed(0)
    cents = 250_000 * torch.rand(8, 3)
    torch.save({"state_dict": Net().state_dict(), "cents": cents}, "step.pth")
