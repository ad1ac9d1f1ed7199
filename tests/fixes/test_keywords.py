"""Arguments that torch's own functions take: an eps, and `zero_infinity` of a CTC loss."""

import subprocess

import pytest
import torch

import nandoctor

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return F.normalize(
            self.lift(x),
            dim=-1,
        )

class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 5)

    def forward(self, x):
        return self.lift(x).log_softmax(-1)

def aligned(output, batch):
    return F.ctc_loss(output, batch["text"], batch["lengths"], batch["text_lengths"])
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE)
    torch.manual_seed(0)
    return tmp_path


def test_an_eps_inside_a_function_of_torch_is_given_to_it(project):
    x = torch.randn(4, 4).half()
    x[1] = 0
    torch.save({"state_dict": {"lift.weight": torch.randn(4, 4).half()}, "x": x}, "dump.pth")
    fix = nandoctor.replay("dump.pth", "net.py:Unit", max_trials=60).report.fixes[0]
    assert fix.verified
    # With 1e-4 gradients pass 65,504 at a loss scale of 256.
    changed = [line for line in fix.patch.splitlines()[3:] if line.startswith(("+", "-"))]
    assert changed == [
        "-            dim=-1,",
        "+            dim=-1, eps=0.001,",
    ]
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    assert nandoctor.replay("dump.pth", "net.py:Unit", fixes=False).verdict == "healthy"


def test_a_text_that_does_not_fit_its_sound_is_left_out(project):
    torch.save(
        {
            "state_dict": {"lift.weight": torch.randn(5, 4), "lift.bias": torch.zeros(5)},
            "x": torch.randn(6, 2, 4),
            "text": torch.tensor([[1, 2, 3], [1, 1, 1]]),
            "lengths": torch.tensor([6, 3]),
            "text_lengths": torch.tensor([3, 3]),
        },
        "dump.pth",
    )
    report = nandoctor.replay("dump.pth", "net.py:Speech", loss="net.py:aligned", max_trials=60).report
    assert report.cause.code == "log-of-zero"
    assert "where the formula gives +Inf" in report.fixes[0].workaround
    assert 'batch["text_lengths"], zero_infinity=True)' in report.fixes[0].patch
