"""-inf is masked by multiplication, and 0 * -inf is NaN."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 6)

    def forward(self, x, valid):
        logp = torch.log_softmax(self.score(x).masked_fill(~valid, float("-inf")), dim=-1)
        return logp * valid


if __name__ == "__main__":
    torch.manual_seed(0)
    valid = torch.ones(4, 6, dtype=torch.bool)
    valid[:, 4:] = False
    torch.save({"state_dict": Net().state_dict(), "x": torch.randn(4, 8), "valid": valid}, "step.pth")
