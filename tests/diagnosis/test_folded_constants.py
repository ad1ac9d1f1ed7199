"""A constant that Python rounds away before torch sees it is in the eps audit, and one that is left is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nandoctor.case import list_eps

GUARD = 1e-17
LARGER = 1e-5
BOUND = 1.0 - 1e-18


class Guarded(nn.Module):
    """Computes one line, in which a constant may be lost."""

    def __init__(self, line, eps=1e-20):
        super().__init__()
        self.line, self.eps, self.gain = line, eps, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.line(self, x.sigmoid())


def by_default(_self, p, guard=1e-21):
    return torch.log1p(-p * (1 - guard))


def by_local(_self, p):
    bound = 1 - 1e-17
    return torch.log1p(-p.clamp(max=bound))


def by_local_set_twice(_self, p):
    bound = 1 - 1e-17
    if p.dim() > 2:
        bound = 1 - 1e-3
    return torch.log1p(-p.clamp(max=bound))


class InClass(Guarded):
    tiny = 1e-19

    def __init__(self, eps=1e-20):
        super().__init__(None, eps)

    def forward(self, x):
        return torch.log1p(-x.sigmoid() * (1 - self.eps)) + torch.log(x.sigmoid() * (1 + self.tiny))


LOST = {
    "in the line": (lambda _, p: torch.log((1.0 + 1e-17) - p), {1e-17}),
    "as a bound": (lambda _, p: torch.log1p(-p.clamp(max=1.0 - 1e-17)), {1e-17}),
    "of the file": (lambda _, p: torch.log(1 + GUARD - p), {1e-17}),
    "behind a name": (lambda _, p: torch.log1p(-torch.clamp(p, max=BOUND)), {1e-18}),
    "beside another": (lambda _, p: torch.log(p * (2 * (1 + GUARD) - 1)), {1e-17}),
    "by default": (by_default, {1e-21}),
    "by a local name": (by_local, {1e-17}),
}
KEPT = {
    "that is left": lambda _, p: torch.log((1.0 + LARGER) - p),
    "added to a tensor": lambda _, p: torch.log(p + 1e-17 + 1),
    "that stands alone": lambda _, p: torch.log(p + 1e-17),
    "set twice": by_local_set_twice,
    "another was passed": lambda self, p: by_default(self, p, guard=1e-3),
    "no number": lambda _, p: torch.log((p.numel() + 1e-17) - p),
}


def lost_in_python(model, folder):
    torch.save({"state_dict": model.state_dict(), "x": torch.linspace(-1, 1, 6)}, folder / "dump.pth")
    uses = list_eps(folder / "dump.pth", lambda: model)
    return {use.value for use in uses if use.dtype is not None and use.dtype.label == "fp64"}


@pytest.mark.parametrize("kind", LOST)
def test_a_constant_that_python_rounds_away_is_listed(kind, tmp_path):
    line, lost = LOST[kind]
    assert lost_in_python(Guarded(line), tmp_path) == lost


@pytest.mark.parametrize("kind", KEPT)
def test_nothing_is_said_of_others(kind, tmp_path):
    assert lost_in_python(Guarded(KEPT[kind]), tmp_path) == set()


@pytest.mark.parametrize(("eps", "lost"), [(1e-20, {1e-20, 1e-19}), (1e-4, {1e-19})])
def test_attributes_count_as_they_are_in_the_model(eps, lost, tmp_path):
    assert lost_in_python(InClass(eps), tmp_path) == lost
