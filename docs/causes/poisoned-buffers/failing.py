"""An earlier step left NaN in the running variance that evaluation reads."""

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
    model.norm.running_var[5] = float("nan")  # a batch that overflowed
    model.eval()
    torch.save({"state_dict": model.state_dict(), "x": x, "logit": model(x).detach()}, "step.pth")
