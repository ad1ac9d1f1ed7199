"""Stable forms of a logarithm at another line than that where the failure shows."""

import pytest
import torch

import nandoctor

RATE = """
import torch
import torch.nn.functional as F
from torch import nn

class Rate(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        rho = self.fc(x)
        sigma = torch.log(1 + torch.exp(-rho.abs() - 18))
        return USE
"""


@pytest.mark.parametrize("use", ["torch.log(sigma)", "1e-9 / sigma"])
def test_a_softplus_by_hand_that_rounds_to_zero(tmp_path, use):
    """What fails is the logarithm of it, or the division; what is at fault is how it was written."""
    (tmp_path / "rate.py").write_text(RATE.replace("USE", use))
    torch.manual_seed(0)
    torch.save({"state_dict": torch.nn.Linear(4, 3).state_dict(prefix="fc."), "x": torch.eye(4)}, tmp_path / "dump.pth")
    fix = nandoctor.replay(tmp_path / "dump.pth", model=f"{tmp_path / 'rate.py'}:Rate").report.fixes[0]
    assert fix.verified
    assert "+        sigma = F.softplus((-rho.abs() - 18).float())" in fix.patch.splitlines()
