"""flex_attention and torch.cond take functions; scripts have no Python caller; some devices lack a backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from strangers.visits import Between, blamed, line, normal

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without", "ignore::DeprecationWarning", "ignore:The .grad attribute"
)


class Attending(nn.Module):
    """Attention whose output is scaled, by scores that `modify` may change."""

    def __init__(self, modify=None, scale=1.0):
        super().__init__()
        self.entry, self.modify, self.scale = nn.Linear(8, 8), modify, scale

    def forward(self, x):
        q = self.entry(x).unsqueeze(1)
        return flex_attention(q, q, q, score_mod=self.modify) * self.scale


def huge(score, b, h, q, k):
    return score * 1e38 * 1e3


def relative(score, b, h, q, k):
    return score + (q - k)


class Choosing(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > -1e9, lambda h: h * 1e6, lambda h: h * 2.0, (x,))


SEQUENCE = {"x": normal(2, 16, 8)}


def test_what_follows_flex_attention(examine):
    report = examine(Attending(scale=1e6), SEQUENCE)
    assert blamed(report) == ("precision", "", "mul", "elementwise-overflow")
    assert line(report) == "return flex_attention(q, q, q, score_mod=self.modify) * self.scale"


def test_the_line_that_changes_the_scores(examine):
    report = examine(Attending(huge), SEQUENCE)
    assert blamed(report) == ("numerics", "", "mul", "elementwise-overflow")
    assert line(report) == "return score * 1e38 * 1e3"


def test_a_branch_of_cond(examine):
    report = examine(Between(Choosing()), {"x": normal(4, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")
    assert line(report) == "return torch.cond(x.sum() > -1e9, lambda h: h * 1e6, lambda h: h * 2.0, (x,))"


def test_healthy_scores(examine):
    assert blamed(examine(Attending(relative), SEQUENCE)) == ("healthy",)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "cannot-tell"), (1e6, "precision")])
def test_gradients_that_this_device_cannot_compute(examine, scale, verdict):
    report = examine(Attending(scale=scale), SEQUENCE, loss=lambda output, _: output.float().mean())
    assert report.verdict == verdict
    said = "The gradients could not be computed on this device. The model's forward raised NotImplementedError"
    assert any(text.startswith(said) for text in (report.headline, *report.notes))


def test_a_backward_that_raises_is_not_told_as_the_forward(examine):
    class Spread(nn.Linear):
        def forward(self, x):
            return torch.sparse.mm(torch.eye(4).to_sparse(), super().forward(x).float())

    report = examine(Spread(8, 8), {"x": normal(4, 8)}, loss=lambda output, _: output.mean())
    assert report.verdict == "cannot-tell"
    assert "The model's backward pass raised RuntimeError" in report.headline


class Scaled(nn.Module):
    """A module to be scripted, with nothing of Python around it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        h = self.inner(x)
        return h * 1e6


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda block: torch.jit.trace(block, normal(4, 8))])
def test_the_line_of_a_model_that_is_a_script(examine, compiled):
    report = examine(compiled(Scaled()), {"x": normal(4, 8)})
    assert blamed(report)[2:] == ("mul", "elementwise-overflow")
    assert line(report) == "return h * 1e6"


def test_a_gradient_that_does_not_fit_what_a_function_took(examine):
    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.float()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1e6

    class Widening(nn.Linear):
        def forward(self, x):
            return Wide.apply(super().forward(x))

    report = examine(Widening(8, 8), {"x": normal(4, 8)}, loss=lambda output, _: output.sum())
    assert blamed(report)[2:] == ("Wide", "gradient-overflow")
