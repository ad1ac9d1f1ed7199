"""A gradient that overflows beside a small divisor: a larger eps, and no loss scale that rounds the others away."""

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
def test_a_larger_eps_comes_before_a_loss_scale(tmp_path, monkeypatch):
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


class Spread(nn.Module):
    """A weight whose gradient is 1e9 in the first sample, and 1e-3 in the others."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.lift.weight)

    def forward(self, x, size):
        return self.lift(x) * size


@pytest.mark.parametrize("others", [4e-3, 4e9])  # with 4e9 every sample overflows, and none is known to be fine
def test_a_scale_that_rounds_small_gradients_away_is_no_fix(others, tmp_path):
    size = torch.full((4, 1), others)
    size[0] = 4e9
    torch.save({"state_dict": Spread().state_dict(), "x": torch.ones(4, 1), "size": size}, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", Spread, loss=lambda output, _: output.float().mean()).report
    scales = [fix for fix in report.fixes if fix.kind == "setting" and fix.settings.loss_scale is not None]
    assert scales
    assert not any(fix.verified for fix in scales)


class Branches(nn.Module):
    """The gradients of one weight are 1e13 times those of the eight others, in every sample."""

    def __init__(self, share):
        super().__init__()
        self.large, self.small, self.share = nn.Linear(1, 1, bias=False), nn.Linear(8, 1, bias=False), share

    def forward(self, x):
        return self.large(x[:, :1]) + self.share * self.small(x)


@pytest.mark.parametrize(("share", "holds"), [(1.0, True), (1e-13, False)])
def test_a_scale_at_which_most_weights_stop_learning_is_no_fix(share, holds, tmp_path):
    torch.manual_seed(0)
    model = Branches(share)
    torch.save({"state_dict": model.state_dict(), "x": torch.ones(4, 8)}, tmp_path / "dump.pth")
    settings = {"loss": lambda output, _: 1e9 * output.float().mean(), "mode": "train"}
    report = nandoctor.replay(tmp_path / "dump.pth", model, **settings).report
    scales = [fix for fix in report.fixes if fix.kind == "setting" and fix.settings.loss_scale is not None]
    assert scales
    assert any(fix.verified for fix in scales) == holds


POINTER = """
import torch
from torch import nn


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.vocab, self.attn, self.gate = nn.Linear(8, 12), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, h, src):
        words = torch.softmax(self.vocab(h), -1)
        copied = torch.softmax(self.attn(h), -1)
        gate = torch.sigmoid(self.gate(h))
        return (gate * words).scatter_add(1, src, (1 - gate) * copied)


def loss(output, batch):
    return -output.gather(1, batch["target"][:, None]).squeeze(1).log().mean()
"""


@pytest.mark.slow
def test_a_line_in_fp32_comes_before_a_scale_below_one(tmp_path, monkeypatch):
    """GradScaler is not meant to come to a loss scale below 1: what is computed elsewhere in fp32 is better."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pointer.py").write_text(POINTER)
    torch.manual_seed(0)
    layers = nn.ModuleDict({"vocab": nn.Linear(8, 12), "attn": nn.Linear(8, 4), "gate": nn.Linear(8, 1)})
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(5, 8, generator=generator) * 30
    src, target = (torch.randint(0, high, size, generator=generator) for high, size in ((6, (5, 4)), (12, (5,))))
    torch.save({"state_dict": layers.state_dict(), "h": h, "src": src, "target": target}, "dump.pth")
    fixes = nandoctor.replay("dump.pth", "pointer.py:Pointer", loss="pointer.py:loss").report.fixes
    kinds = [fix.kind for fix in fixes if fix.verified]
    assert "setting" in kinds
    assert kinds[0] == "source"
