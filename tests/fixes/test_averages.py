"""An average of nothing becomes a sum over a count of at least 1, and any other average stays what it was."""

import math
import runpy
import subprocess

import pytest
import torch

import nandoctor

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 3)

    def forward(self, x):
        return self.lift(x)

def loss(output, batch):
    valid, labels = batch["valid"], batch["labels"]
    LOSS
"""
LOSSES = {
    "mse": 'return F.mse_loss(output[valid], batch["y"][valid])',
    "labels": "return F.cross_entropy(output, torch.where(valid, labels, -1), ignore_index=-1)",
    "mean": "return (output - batch['y'])[valid].square().mean()",
    "comprehension": """return sum(
        [F.l1_loss(o[v], y[v]) for o, y, v in zip(output, batch["y"], valid[:, None].expand(-1, 3))]
    )""",
}


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if form != "labels" else []) for form in LOSSES]
)
def test_an_average_of_nothing_is_zero(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE.replace("LOSS", LOSSES[form]))
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, 4), "y": torch.randn(5, 3), "labels": torch.arange(5) % 3}
    batch["valid"] = torch.zeros(5, dtype=torch.bool)
    before = runpy.run_path("net.py")
    torch.save({"state_dict": before["Net"]().state_dict(), **batch}, "dump.pth")
    (fix, *_) = nandoctor.replay("dump.pth", "net.py:Net", loss="net.py:loss", mode="train").report.fixes
    assert fix.verified
    assert fix.kind == "source"
    assert "isnan" not in fix.patch
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    loss, output = runpy.run_path("net.py")["loss"], torch.randn(5, 3)
    assert loss(output, batch) == 0
    full = {**batch, "valid": torch.tensor([True, True, True, False, True])}
    expected = before["loss"](output, {**full, "valid": torch.ones(5, dtype=torch.bool)})
    assert math.isclose(loss(output, {**full, "valid": torch.ones(5, dtype=torch.bool)}), expected, rel_tol=1e-6)
    assert math.isfinite(loss(output, full))


SPREAD = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = torch.nn.Linear(4, 3)

    def forward(self, x, group):
        h = self.lift(x)
        parts = [(h[group == k].amax(0) - 1) / (FORM + 1) for k in range(2)]
        return torch.stack(parts)
"""


@pytest.mark.parametrize(
    "form", ["h[group == k].std(0)", pytest.param("torch.var(h[group == k], dim=0)", marks=pytest.mark.slow)]
)
def test_one_value_has_no_spread(form, tmp_path):
    path = tmp_path / "net.py"
    path.write_text(SPREAD.replace("FORM", form))
    torch.manual_seed(0)
    x, before = torch.randn(4, 4), runpy.run_path(str(path))["Net"]()
    dump = {"state_dict": before.state_dict(), "x": x, "group": torch.tensor([0, 1, 0, 0])}
    torch.save(dump, tmp_path / "dump.pth")
    (fix, *_) = nandoctor.replay(tmp_path / "dump.pth", f"{path}:Net").report.fixes
    assert (fix.verified, fix.kind) == (True, "source")
    assert "correction=min(1, h[group == k].shape[0] - 1)" in fix.patch


AS_BEFORE = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.center = nn.Parameter(torch.arange(3.0))

    def forward(self, x, valid):
        h = self.fc(x)
        return h, FORM
"""


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "form",
    [
        "F.mse_loss(self.center, h[valid])",  # as many elements as both have together
        pytest.param("F.l1_loss(F.dropout(h)[valid], h[valid])", marks=pytest.mark.slow),
        "self.norm(h)[valid].std(0) if valid.any() else h.sum(0)",  # a layer that counts its calls
    ],
)
def test_an_average_of_some_values_stays_as_it_was(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(AS_BEFORE.replace("FORM", form))
    before = runpy.run_path("net.py")["Net"]()
    few = torch.arange(5) < form.count("std")
    torch.save({"state_dict": before.state_dict(), "x": torch.randn(5, 4), "valid": few}, "dump.pth")
    (fix, *_) = nandoctor.replay("dump.pth", "net.py:Net", mode="train").report.fixes
    assert fix.verified
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    after = runpy.run_path("net.py")["Net"]()
    after.load_state_dict(before.state_dict())
    given = torch.randn(6, 4), torch.arange(6) > 1
    for net in (before, after):
        torch.manual_seed(0)
        net.made = net(*given)[1]
    assert torch.allclose(before.made, after.made, rtol=1e-5)
    assert before.norm.num_batches_tracked == after.norm.num_batches_tracked


def test_an_average_that_is_infinite_stays_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(AS_BEFORE.replace("FORM", "(h[valid].abs() * 1e38 * 1e38).mean(0)"))
    net = runpy.run_path("net.py")["Net"]()
    torch.save({"state_dict": net.state_dict(), "x": torch.randn(5, 4), "valid": torch.arange(5) < 0}, "dump.pth")
    (fix, *_) = nandoctor.replay("dump.pth", "net.py:Net", mode="train").report.fixes
    assert fix.verified
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    assert torch.isinf(runpy.run_path("net.py")["Net"]()(torch.randn(5, 4), torch.arange(5) < 3)[1]).all()
