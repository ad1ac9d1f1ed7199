"""-1e9 is -inf in fp16, and one row is masked throughout: softmax divides 0 by 0."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 6)

    def forward(self, x, mask):
        scores = self.score(x)
        scores = scores + mask.to(scores.dtype) * -1e9
        return torch.softmax(scores.float(), dim=-1)


if __name__ == "__main__":
    torch.manual_seed(0)
    mask = torch.zeros(4, 6)
    mask[1] = 1  # a sample that is nothing but padding
    torch.save({"state_dict": Net().state_dict(), "x": torch.randn(4, 8), "mask": mask}, "step.pth")
