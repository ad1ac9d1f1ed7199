"""Which op is blamed for gradients that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nandoctor


class Gated(nn.Module):
    """The root's infinite derivative at 0 meets the zeros of relu's; the arc cosine's reaches the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def gate(self, x):
        return torch.sqrt(torch.relu(x))

    def forward(self, x):
        x = self.weight * x
        return self.gate(x) + torch.acos(x / 4)


class Detached(Gated):
    """The root goes on to a weight of its own, and to one that relu keeps it from."""

    def gate(self, x):
        return torch.sqrt(torch.relu(x)) * torch.sqrt(self.weight - 1)


@pytest.mark.parametrize(("model", "blamed"), [(Gated, ["acos"]), (Detached, ["sqrt", "acos"])])
def test_a_gradient_that_a_later_op_removes_is_no_origin(tmp_path, model, blamed):
    x = torch.tensor([[-1.0, 2.0, 4.0], [1.0, -3.0, 0.5]])
    torch.save({"state_dict": model().state_dict(), "x": x}, tmp_path / "dump.pth")
    options = {"loss": lambda made, _: made.float().mean(), "fixes": False}
    report = nandoctor.replay(tmp_path / "dump.pth", model, **options).report
    assert sorted([report.origin.op, *(other.origin.op for other in report.also)]) == sorted(blamed)
