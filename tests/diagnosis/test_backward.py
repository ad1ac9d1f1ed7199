"""Which op is blamed for gradients that are not finite."""

import re

import pytest
import torch
from strangers.visits import Lifted
from torch import nn


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


class Passes(Gated):
    def forward(self, x):
        return sum(torch.sqrt(part - part.detach()) for part in (self.weight * x).unbind(1))


@pytest.mark.parametrize(("model", "blamed"), [(Gated, ["acos"]), (Detached, ["sqrt", "acos"]), (Passes, ["sqrt"])])
def test_a_gradient_that_a_later_op_removes_is_no_origin(replay, model, blamed):
    x = torch.tensor([[-1.0, 2.0, 4.0], [1.0, -3.0, 0.5]])
    report = replay(model, {"x": x}, loss=lambda made, _: made.float().mean(), fixes=False)
    assert sorted([report.origin.op, *(other.origin.op for other in report.also)]) == sorted(blamed)


class Recurrent(nn.Module):
    """Autocast casts the weight once for all steps, and autograd adds the gradients of that cast in fp16."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x):
        state = x
        for _ in range(4):
            state = torch.tanh(self.cell(state)) + x
        return state


def branching(lifted, _):
    return torch.stack([lifted * factor for factor in (1.0, 1.5, 0.5, 1.2)]).float().sum(0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8).half())

    def forward(self, x):
        return (x * self.weight).float() + (x * self.weight).float()


def hooked(lifted, _):
    if lifted.requires_grad:
        lifted.register_hook(lambda gradient: gradient * float("inf"))
    return torch.stack([lifted, lifted * 1.5]).float().sum(0)


@pytest.fixture
def replay_scaled(replay):
    def replay_scaled(model, x, scale, factor=1.0):
        options = {"loss": lambda made, _: factor * made.float().sum(), "loss_scale": scale, "max_trials": 10}
        return replay(model, {"x": x}, **options)

    return replay_scaled


@pytest.mark.parametrize(
    ("model", "x", "scale"),
    [
        (Recurrent, torch.ones(64, 8), 512.0),
        (Lifted(branching), torch.ones(4, 8), 30000.0),
        (Tied, torch.ones(4, 8).half(), 40000.0),
    ],
)
def test_a_sum_of_gradients_that_overflows_is_no_operations(replay_scaled, model, x, scale):
    report = replay_scaled(model, x, scale)
    assert (report.verdict, report.cause) == ("loss-scale", None)
    assert re.search(r"no (traced )?operation made it so", report.headline)


def test_a_hook_that_spoils_a_sum_is_not_told_as_one(replay_scaled):
    report = replay_scaled(Lifted(hooked), torch.ones(4, 8), 1.0)
    assert report.cause is None
    assert "no operation made it so" in report.headline
