"""Ops with a value for infinities and without a derivative: the gradient is an indeterminate form, not infinite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nandoctor


class Merge(nn.Module):
    """Log probabilities of two ways, either of which may be closed."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(2, 2)

    def forward(self, x, closed):
        scores = self.score(x).float() + torch.where(closed, -torch.inf, 0.0)
        return torch.logaddexp(scores[:, 0], scores[:, 1]).exp()


class Reach(nn.Module):
    """How much of what is so far away arrives; nothing from infinitely far."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.ones(2))

    def forward(self, distance, closed):
        far = distance.masked_fill(closed, torch.inf)
        return torch.exp(-(far * self.rate).float())


class Length(nn.Module):
    """The root of what may be 0, beside an infinity that is no trouble: here the slope is infinite."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.ones(2))

    def forward(self, x, closed):
        squared = ((x * self.rate).float() ** 2).sum(1) * closed.any(1)
        roots = torch.cat([squared, squared.new_full((1,), torch.inf)]).sqrt()
        return roots[:-1]


def diagnose(model, tmp_path, closed):
    """The report on a step whose second sample may be closed altogether."""
    torch.manual_seed(0)
    batch = {"x": torch.rand(3, 2) + 0.5, "closed": closed}
    torch.save({"state_dict": model.state_dict(), **batch}, tmp_path / "step.pth")
    return nandoctor.replay(
        tmp_path / "step.pth",
        model=lambda: model,
        call=lambda module, arrays: module(arrays["x"], arrays["closed"]),
        loss=lambda output, _: output.sum(),
        fixes=False,
    ).report


CLOSED = torch.tensor([[False, False], [True, True], [False, True]])


@pytest.mark.parametrize(
    ("make", "op", "code"),
    [
        (Merge, "logaddexp", "indeterminate-form"),
        (Reach, "mul", "indeterminate-form"),
        (Length, "sqrt", "gradient-singularity"),
    ],
)
def test_the_cause_is_what_the_op_was_given(make, op, code, tmp_path):
    report = diagnose(make(), tmp_path, CLOSED)
    assert (report.origin.phase, report.origin.op, report.cause.code) == ("backward", op, code)


def test_infinities_that_harm_no_gradient_are_healthy(tmp_path):
    assert diagnose(Merge(), tmp_path, torch.tensor([[False, True]] * 3)).verdict == "healthy"
