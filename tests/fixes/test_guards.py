"""A point where a derivative is infinite is kept out of the gradient: safe inside, selected outside."""

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
        self.lift = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.lift.weight)

    def forward(self, x):
        h = self.lift(x)
        BODY

def loss(output, batch):
    return (output.float() * torch.arange(1.0, output.shape[-1] + 1)).mean()
"""
FORMS = {
    "where": "return torch.where(h > 0, torch.sqrt(h), torch.zeros_like(h))",
    "masked-fill": "return torch.log(h).masked_fill(h <= 0, 0.0)",
    "nan-to-num": "return (h / h.sum(-1, keepdim=True)).nan_to_num()",
    "in place": """h = h * 2
        h /= h.sum(-1, keepdim=True)
        return h""",
    "visible": "return h.sum(-1).sqrt()",
    "two": """n = h.pow(2).sum(
            -1, keepdim=True
        ).sqrt()
        return torch.where(h > 0, h.sqrt(), h) / (n + 1e-3)""",
}
QUICK = ("where", "nan-to-num", "in place")
SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form not in QUICK]


@pytest.fixture
def diagnosed(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE.replace("BODY", FORMS[request.param]))
    x = torch.tensor([[1.0, 0.5, 0.0, 2.0], [0.0] * 4])
    torch.save({"state_dict": {"lift.weight": torch.eye(4)}, "x": x}, "dump.pth")
    return nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss", max_trials=60).report


@pytest.mark.parametrize("diagnosed", [*QUICK, *SLOW], indirect=True)
def test_the_gradient_is_kept_off_the_point(diagnosed, tmp_path):
    fix = diagnosed.fixes[0]
    assert fix.verified or fix.workaround is not None, diagnosed.headline
    assert fix.kind == "source"
    before = nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss", fixes=False).verdict
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    after = nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss", fixes=False).verdict
    assert (before, after) == ("numerics", "healthy")


@pytest.mark.parametrize("diagnosed", ["two"], indirect=True)
def test_a_condition_that_stands_there_is_not_written_again(diagnosed):
    (line,) = [line for line in diagnosed.fixes[0].patch.splitlines() if line.startswith("+ ") and "h > 0" in line]
    assert line.count("h > 0") == 2
