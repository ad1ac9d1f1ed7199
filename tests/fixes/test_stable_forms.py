"""Stable forms of a quotient or a logarithm at another line than that where the failure shows."""

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


POOL = """
import torch
from torch import nn

class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 1)

    def forward(self, x, mask):
        w = torch.exp(self.score(x).squeeze(-1))
        w = w * mask
        return (x * w.unsqueeze(-1) / w.sum(1)[:, None, None]).sum(1)
"""
READER = """
import torch
from torch import nn

from pool import Pool

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.out = Pool(), nn.Linear(4, 3)
    def forward(self, x, mask):
        return self.out(self.pool(x, mask))
"""


def test_a_weighted_average_with_a_mask_after_the_exponential(tmp_path):
    """The line of the mask has a layer on the same line of another file, at the same columns."""
    line = POOL.splitlines().index("        w = w * mask")
    assert READER.splitlines().index("        return self.out(self.pool(x, mask))") == line
    (tmp_path / "pool.py").write_text(POOL)
    (tmp_path / "reader.py").write_text(READER)
    torch.manual_seed(0)
    state = {"pool.score.weight": torch.ones(1, 4), "pool.score.bias": torch.zeros(1)}
    out = torch.nn.Linear(4, 3).state_dict(prefix="out.")
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5)
    x[1, 2], mask[:, 4] = 30.0, 0.0
    torch.save({"state_dict": state | out, "x": x, "mask": mask}, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", model=f"{tmp_path / 'reader.py'}:Reader").report
    (fix,) = (fix for fix in report.fixes if fix.verified and fix.kind == "source")
    assert "return (x * torch.exp((logits.float() + torch.log(mask)).unsqueeze(-1) - torch.logsumexp(" in fix.patch
