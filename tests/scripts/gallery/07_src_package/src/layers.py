import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        rms = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(rms + self.eps) * self.scale
