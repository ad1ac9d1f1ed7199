"""An Inf that the forward hides, and that makes a gradient NaN or decides a choice: mended where it was made."""

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


@pytest.mark.parametrize(
    "form", ["divided", *(pytest.param(it, marks=pytest.mark.slow) for it in ("reciprocal", "log"))]
)
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


CHOICE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.mix = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        scores = self.score(x)
        rest = REST
        best = (scores * scores).argmax(-1)
        return self.mix(x[best] * 1e-3) + rest

def loss(output, batch):
    return output.float().square().mean() * SCALE
"""


def replay_choice(folder, *, rest="0.0", scale="1.0"):
    """Two scores of the first row overflow, and the one that is chosen for coming first is the larger indeed."""
    (folder / "net.py").write_text(CHOICE.replace("REST", rest).replace("SCALE", scale))
    state = {"score.weight": torch.eye(4), "mix.weight": torch.eye(4), "mix.bias": torch.zeros(4)}
    x = torch.tensor([[400.0, 300.0, 1.0, 2.0], [1.0, 2.0, 3.0, 5.0], [3.0, 1.0, 0.5, 0.1], [0.1, 0.2, 0.3, 0.4]])
    torch.save({"state_dict": state, "x": x}, "dump.pth")
    return nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss").report


def test_a_choice_is_mended_along_with_the_gradients(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = replay_choice(tmp_path, scale="1e6")
    assert (report.verdict, report.cause.code) == ("silent", "elementwise-overflow")
    assert "scores * scores" in report.headline
    assert report.bad_gradients
    assert "gradient-overflow" in [diagnosis.cause.code for diagnosis in report.also]
    assert report.fixes[0].verified
    subprocess.run(["git", "apply", "-p1"], input=report.fixes[0].patch, text=True, check=True)
    assert nandoctor.verify("dump.pth", "net.py:Net", loss="net.py:loss").outcome == "passes"


@pytest.mark.slow
def test_a_change_that_leaves_the_choice_is_not_verified(tmp_path, monkeypatch):
    """Without the NaN, the output is that of fp32, and still chosen by an Inf."""
    monkeypatch.chdir(tmp_path)
    report = replay_choice(tmp_path, rest="(scores * scores * scores).sum() * 0")
    assert report.cause.code == "elementwise-overflow"
    for fix in report.fixes:
        chooses_in_fp32 = "best" in fix.patch or "self.score(" in fix.patch
        assert chooses_in_fp32 or not fix.verified, fix.title
    failed = [check for fix in report.fixes for check in fix.checks if check.status == "failed"]
    assert any(check.name == "hidden values" and "argmax (net.py:" in check.text for check in failed)
