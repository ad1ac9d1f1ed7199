from torch import nn

from .config import CFG
from .layers import RMSNorm


class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inp = nn.Linear(8, cfg.width, bias=False)
        self.norm = RMSNorm(cfg.width, cfg.eps)
        self.out = nn.Linear(cfg.width, cfg.classes)

    def forward(self, x):
        return self.out(self.norm(self.inp(x)))
