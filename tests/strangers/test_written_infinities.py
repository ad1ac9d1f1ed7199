"""Infinities in buffers: what the model's own code writes is no damage, what a file or a builder adds is."""

import math

import pytest
import torch
from torch import nn

from nandoctor.step import setup
from strangers.visits import normal
from strangers.written_infinities import CAUSAL

UNPADDED = {"x": normal(3, 5, 4), "padding": torch.zeros(3, 5, dtype=torch.bool)}


class Sloped(nn.Module):
    """Attention with ALiBi's slopes and the causal mask in one buffer."""

    def __init__(self):
        super().__init__()
        distance = torch.arange(5.0)[:, None] - torch.arange(5.0)
        self.register_buffer("bias", (-distance).masked_fill(CAUSAL, -math.inf))

    def forward(self, x, padding):
        scores = (x @ x.mT + self.bias).masked_fill(padding[:, None], -math.inf)
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(("spoilt", "cause"), [(False, "fully-masked-softmax"), (True, "poisoned-buffers")])
def test_a_buffer_that_the_model_fills_with_a_mask(replay, monkeypatch, spoilt, cause, is_large):
    """What the constructor writes itself is no damage; one -inf more is. A large model is built unfilled."""
    monkeypatch.setattr(setup, "_UNFILLED_NBYTES", 0 if is_large else math.inf)
    model, padding = Sloped(), UNPADDED["padding"].clone()
    padding[1, 0] = True
    model.bias[2, 1] = -math.inf if spoilt else -1.0
    report = replay(model, {**UNPADDED, "padding": padding}, builds=Sloped, fixes=False)
    assert report.cause.code == cause
    assert (report.verdict == "state") == spoilt


def test_a_causal_mask_among_the_weights_is_no_damage(replay):
    report = replay(Sloped, UNPADDED, fixes=False)
    assert (report.verdict, report.origin) == ("healthy", None)
    assert not any("saved state" in note for note in report.notes)


def test_a_buffer_that_the_model_builds_infinite(replay):
    """No checkpoint from before has another value."""

    class Frequencies(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inverse", 1 / torch.arange(4.0))

        def forward(self, x):
            return (x * self.inverse).sin()

    report = replay(Frequencies, {"x": normal(3, 4)})
    assert report.cause.code == "poisoned-buffers"
    assert report.headline.endswith("is +Inf in 1 of 4 values as the model's own code builds it")
    assert not any(fix.verified for fix in report.fixes)
    assert report.next_steps[0].startswith("Look at the code that builds the model")
    assert any("the code that builds the model, knows" in note for note in report.search_notes)


class Holding(nn.Module):
    """Anything infinite that the builder writes, and a step that reads it."""

    def __init__(self, held, step):
        super().__init__()
        self.held, self.step = nn.Parameter(held, requires_grad=False), step

    def forward(self, x):
        return self.step(x, self.held)


BUILT = {
    "rates": (1 / torch.arange(4.0), lambda x, held: (x * held).sin(), ("state", "poisoned-weights")),
    "a mask": (torch.ones(3, 3).tril().log(), lambda x, held: (x @ x.T + held).softmax(-1) @ x, ("healthy", None)),
    "bounds that no step reads": (torch.tensor([-math.inf, math.inf]), lambda x, held: x, ("healthy", None)),
}


@pytest.mark.parametrize("name", BUILT)
def test_infinities_of_the_builder(name, replay):
    *parts, answer = BUILT[name]
    report = replay(lambda: Holding(*parts), {"x": normal(3, 4)}, fixes=False)
    assert (report.verdict, report.cause and report.cause.code) == answer
    assert not any("saved state" in note for note in report.notes)
