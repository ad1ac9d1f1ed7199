"""NaN of a target is replaced before the arithmetic where a mask leaves it out later, and nowhere else."""

import subprocess

import torch

import nandoctor

FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, 1)

    def forward(self, x):
        return self.lift(x).squeeze(-1)


def loss(output, batch):
    y = batch["y"]
    LOSS
"""


def fixes_of(loss, folder, size):
    (folder / "net.py").write_text(FILE.replace("LOSS", loss))
    torch.manual_seed(0)
    x, y = torch.randn(size, 3), torch.randn(size)
    y[2] = torch.nan
    torch.save(
        {"state_dict": {"lift.weight": torch.ones(1, 3), "lift.bias": torch.ones(1)}, "x": x, "y": y}, "dump.pth"
    )
    fixes = nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss").report.fixes
    return [fix for fix in fixes if fix.kind == "source"]


def test_a_masked_target_is_cleaned_before_the_arithmetic(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = "return ((output - y.view(-1)) ** 2 * ~torch.isnan(y)).sum() / torch.isfinite(y).sum()"
    (fix,) = fixes_of(body, tmp_path, 8)
    assert fix.verified
    assert "(output - y.view(-1).nan_to_num(0.0)) ** 2" in fix.patch
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    assert nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss", fixes=False).verdict == "healthy"


def test_a_target_that_counts_is_not_replaced(tmp_path, monkeypatch):
    """One of so many that it changes the loss by less than 1 % is still a number that was made up."""
    monkeypatch.chdir(tmp_path)
    assert fixes_of("return (output - y).abs().mean()", tmp_path, 100_000) == []
