"""A gradient that overflows beside a small divisor: a larger eps."""

import subprocess

import pytest
import torch
from torch import nn

import nandoctor

FILE = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(10, 6, bias=False)

    def forward(self, x, y):
        a, b = self.lift(x), self.lift(y)
        return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-8)


def loss(output, batch):
    return (1 - output.float()).mean()
"""


@pytest.mark.slow
def test_a_larger_eps_keeps_the_gradient_in_range(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE)
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 10)
    x[3] = 0
    torch.save({"state_dict": {"lift.weight": nn.Linear(10, 6).weight.data}, "x": x, "y": y}, "dump.pth")
    report = nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss").report
    assert report.cause.code == "gradient-overflow"
    first = report.fixes[0]
    assert (first.verified, first.kind) == (True, "source"), first.title
    subprocess.run(["git", "apply", "-p1"], input=first.patch, text=True, check=True)
    assert nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss", fixes=False).verdict == "healthy"
