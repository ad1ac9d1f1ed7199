"""An Inf that the forward hides and the backward multiplies by zero: blamed, and mended, where it was made."""

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
        self.mix = nn.Linear(2, 2)

    def forward(self, x):
        distance = (x[:, None] - x[None]).norm(dim=-1)
        near = BODY
        pairs = self.mix(torch.stack([near, distance], -1))[..., 0]
        return pairs.masked_fill(torch.eye(len(x), dtype=torch.bool), 0.0).sum(-1)

def loss(output, batch):
    return (output.float() ** 2).mean()
"""
FORMS = {
    "divided": ("1 / distance", "division-by-zero"),
    "reciprocal": ("torch.reciprocal(distance)", "division-by-zero"),
    "log": ("-distance.log()", "log-of-zero"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_origin_is_blamed_and_mended(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body, code = FORMS[form]
    (tmp_path / "net.py").write_text(FILE.replace("BODY", body))
    torch.manual_seed(0)
    state = {"mix.weight": torch.randn(2, 2), "mix.bias": torch.zeros(2)}
    torch.save({"state_dict": state, "x": torch.randn(5, 3)}, "dump.pth")
    report = nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss").report
    assert report.cause.code == code
    assert "`distance`" in report.headline
    assert report.origin.source.line == FILE.splitlines().index("        near = BODY") + 1
    assert report.fixes[0].verified
    subprocess.run(["git", "apply", "-p1"], input=report.fixes[0].patch, text=True, check=True)
    assert nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss", fixes=False).verdict == "healthy"
