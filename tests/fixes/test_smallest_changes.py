"""Of the changes that hold, the one that asks for least: no part that is not needed, one call of a layer of several."""

import pytest
import torch

import nandoctor
from nandoctor.fixes.budget import BudgetSpent

FILE = """
import torch
from torch import nn

class Mel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.ones(3, 5))
        self.head = nn.Linear(3, 2)

    def forward(self, power):
        mel = torch.matmul(power, self.bank.T)
        return self.head(torch.log10(mel.clamp(min=1e-10)))

"""


@pytest.fixture
def fixes_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE)
    torch.manual_seed(0)

    def replay(name, modules, **arrays):
        state = torch.nn.ModuleDict(modules).state_dict()
        torch.save({"state_dict": state | arrays.pop("buffers", {}), **arrays}, "dump.pth")
        return nandoctor.replay("dump.pth", f"net.py:{name}").report.fixes

    return replay


def test_what_another_part_mends_is_left_out(fixes_of):
    """An eps that fp16 rounds to 0 is none where the product before it is in fp32."""
    power = torch.rand(4, 5) * torch.tensor([[1.0], [1e5], [0.0], [1.0]])
    fixes = fixes_of("Mel", {"head": torch.nn.Linear(3, 2)}, power=power, buffers={"bank": torch.ones(3, 5)})
    verified = [fix for fix in fixes if fix.verified]
    assert "torch.matmul(power.float(), self.bank.T.float())" in verified[0].patch
    assert not any("clamp(min=1e-10).clamp" in fix.patch for fix in verified)


def test_a_fix_is_kept_if_the_budget_ends_on_a_smaller_one(fixes_of, monkeypatch):
    def end_budget(*_):
        raise BudgetSpent

    monkeypatch.setattr("nandoctor.fixes.search._Search._without_idle_parts", end_budget)
    power = torch.rand(4, 5) * torch.tensor([[1.0], [1e5], [0.0], [1.0]])
    fixes = fixes_of("Mel", {"head": torch.nn.Linear(3, 2)}, power=power, buffers={"bank": torch.ones(3, 5)})
    assert [fix.verified for fix in fixes] == [True]


DISPARITY = """
import torch
from torch import nn

class Rays(nn.Module):
    def __init__(self):
        super().__init__()
        self.density = nn.Linear(3, 1)

    def forward(self, rays):
        depth = torch.relu(self.density(rays)).squeeze(-1)
        return depth, 1 / depth

def loss(output, batch):
    depth, disparity = output
    return (depth - 1).abs().mean() + 1e-3 * disparity.mean()
"""


def test_no_loss_of_millions_is_made_of_an_empty_sample(tmp_path, monkeypatch):
    """1 / 1e-12 of one ray, weighted and averaged, is less than 1e9, and a billion times the loss of the others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rays.py").write_text(DISPARITY)
    state = {"density.weight": torch.ones(1, 3), "density.bias": torch.zeros(1)}
    rays = torch.rand(8, 3) + 0.5
    rays[2] = -1.0
    torch.save({"state_dict": state, "rays": rays}, "dump.pth")
    fix = nandoctor.replay("dump.pth", "rays.py:Rays", loss="rays.py:loss").report.fixes[0]
    assert (fix.workaround is not None, fix.kind) == (True, "source")
    assert "torch.where(depth == 0, 0.0, 1 / torch.where(depth == 0, 1.0, depth))" in fix.patch
