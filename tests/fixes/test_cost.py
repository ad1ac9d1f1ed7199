"""What a fix costs is counted from shapes, and agrees with torch's own counter of operations."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8 * 6 * 6, 5)
        nn.init.constant_(self.head.weight, 30000.0)

    def forward(self, x):
        return self.head(self.conv(x).relu().flatten(1))


def test_the_share_of_multiply_adds_is_torchs_own(replay):
    model, x = Net(), torch.rand(2, 3, 8, 8)
    fixes = replay(model, {"x": x}, builds=Net).fixes
    (kept,) = [fix for fix in fixes if getattr(fix.edit, "module", None) == "head"]
    with FlopCounterMode(display=False) as counter:
        model(x)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    assert kept.cost.products_in_fp32 == pytest.approx(counts["Net.head"] / counts["Net"])
    assert 0 < kept.cost.more_activations < 0.1  # ten numbers beside the 576 of the convolution, and their relu
