"""A model in half precision without autocast gets its failing lines in fp32, with a cast back, and no module."""

import subprocess

import pytest
import torch

import nandoctor

FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        h = self.entry(x)
        {first}
        {second}
        return self.head(h)


def build():
    return Net().half()
"""


@pytest.mark.parametrize(
    ("first", "second", "written"),
    [
        (
            "size = h.pow(2).mean(-1, keepdim=True)",
            "h = h * torch.rsqrt(size + 1e-3)",
            ["+        size = h.float().pow(2).mean(-1, keepdim=True).to(h.dtype)"],
        ),
        (
            "size = (h * h).sum(-1, keepdim=True)",
            "h = h / size.sqrt()",
            [
                "+        size = (h.float() * h.float()).sum(-1, keepdim=True)",
                "+        h = (h.float() / size.float().sqrt()).to(h.dtype)",
            ],
        ),
    ],
    ids=["it fits again at once", "it fits again a line later"],
)
def test_the_lines_are_widened_until_the_value_fits_again(first, second, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE.format(first=first, second=second))
    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"entry": torch.nn.Linear(8, 16), "head": torch.nn.Linear(16, 2)}).half()
    x = (300 * torch.randn(3, 8)).half()
    torch.save({"state_dict": net.state_dict(), "x": x}, "dump.pth")
    options = {"amp_dtype": "none"}
    (fix, *_) = nandoctor.replay("dump.pth", "net.py:build", **options).report.fixes
    assert fix.verified, [(fix.title, fix.checks)]
    assert [line for line in fix.patch.splitlines() if line.startswith("+ ")] == written
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    assert nandoctor.replay("dump.pth", "net.py:build", fixes=False, **options).verdict == "healthy"
