"""A mask selects nothing in one sample, so its mean divides by a count of 0."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)

    def forward(self, x, mask):
        x = self.embed(x) * mask
        return x.sum(dim=1) / mask.sum(dim=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    mask = torch.ones(4, 5, 1)
    mask[3] = 0
    torch.save({"state_dict": Net().state_dict(), "x": torch.randn(4, 5, 8), "mask": mask}, "step.pth")
