"""A sample that is all padding is not masked: its row is finite, and can be left out of the loss."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 6)

    def forward(self, x, padding):
        padding = padding & ~padding.all(dim=-1, keepdim=True)
        scores = self.score(x).masked_fill(padding, float("-inf"))
        return torch.softmax(scores, dim=-1)


if __name__ == "__main__":
    torch.manual_seed(0)
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[1] = True
    torch.save({"state_dict": Net().state_dict(), "x": torch.randn(4, 8), "padding": padding}, "step.pth")
