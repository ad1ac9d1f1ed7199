"""Models that refuse train mode, which a replay tries first: the step was one of evaluation, and that is replayed."""

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
X, REFUSED = {"x": normal(3, 8)}, "In train mode the model does not run"


@rows("numerics . log log-of-zero", X, mode=None, says=(REFUSED, "targets should not be None"))
class Detector(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)

    def forward(self, x, targets=None):
        if self.training and targets is None:
            raise ValueError("targets should not be None when in training mode")
        return torch.log(super().forward(x).relu().float())


@rows("numerics . log log-of-zero", X, mode=None, says=(REFUSED, "mixing takes pairs"))
class Mixing(Detector):
    def forward(self, x):
        assert not self.training or len(x) % 2 == 0, "mixing takes pairs"
        return super().forward(x)
