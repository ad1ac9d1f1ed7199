"""A cast that rounds a divisor to zero is where the change belongs, not the division."""

import subprocess

import torch

import nandoctor

FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([0.5, 1e-2, 1e-9]))

    def forward(self, x, t):
        a = self.scale[t].half()[:, None]
        return self.lift(x) / torch.sqrt(a)
"""


def test_a_cast_before_the_failing_op_is_widened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE)
    torch.manual_seed(0)
    weights = {"lift.weight": torch.rand(4, 4), "lift.bias": torch.zeros(4), "scale": torch.tensor([0.5, 1e-2, 1e-9])}
    torch.save({"state_dict": weights, "x": torch.rand(3, 4) / 100, "t": torch.tensor([0, 1, 2])}, "dump.pth")
    fixes = nandoctor.replay("dump.pth", "net.py:Net").report.fixes
    assert fixes[0].verified, [(fix.title, fix.checks) for fix in fixes]
    assert "+        a = self.scale[t].float()[:, None]" in fixes[0].patch.splitlines()
    subprocess.run(["git", "apply", "-p1"], input=fixes[0].patch, text=True, check=True)
    assert nandoctor.replay("dump.pth", "net.py:Net", fixes=False).verdict == "healthy"


OF_BACKWARD = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor([0.5, 1e-2, 1e-9]))

    def forward(self, x):
        a = self.scale.half()
        return self.lift(x) * torch.sqrt(a)


def loss(output, batch):
    return output.float().square().mean()
"""


def test_a_cast_that_fails_the_backward_alone_is_widened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(OF_BACKWARD)
    torch.manual_seed(0)
    weights = {"lift.weight": torch.rand(3, 4), "lift.bias": torch.zeros(3), "scale": torch.tensor([0.5, 1e-2, 1e-9])}
    torch.save({"state_dict": weights, "x": torch.rand(3, 4)}, "dump.pth")
    report = nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss").report
    assert report.origin.phase == "backward"
    added = [line for fix in report.fixes if fix.verified for line in fix.patch.splitlines() if line.startswith("+  ")]
    assert "+        a = self.scale.float()" in added
