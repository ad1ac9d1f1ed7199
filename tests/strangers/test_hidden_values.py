"""A finite output beside NaN that a later step reads, or that chose what the output is; and what only looks like it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from strangers.visits import blamed, normal

BATCH = {"x": normal(4, 4)}
NAN = ("numerics", "", "div", "division-by-zero")


class Hiding(nn.Module):
    """A layer, a table of five rows, places to keep things in, and anything that uses them."""

    def __init__(self, then):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), nn.Embedding(5, 4)
        self.memory, self.log, self.then = {}, [], then

    def forward(self, x):
        return self.then(self, self.layer(x))


def nan(h):
    return (h - h) / (h - h)


def kept_in_a_dict(model, h):
    model.memory["h"] = nan(h)
    return h


def kept_in_a_list(model, h):
    model.log.append(nan(h).detach())
    return h


def chosen_by_argmax(model, h):
    return model.table(nan(h).argmax(-1))


def chosen_among_infinities(model, h):
    return model.table((h / (h - h)).argmax(-1))


def chosen_by_topk(model, h):
    return model.table(nan(h).topk(2).indices).sum(1)


def made_whole_numbers(model, h):
    return model.table(nan(h).to(int).clamp(0, 4))


def compared(_model, h):
    return torch.where(nan(h) > 0, h, -h)


def asked_by_python(_model, h):
    return 2 * h if nan(h).mean().item() > 0 else h


def counted(_model, h):
    return h * nan(h).count_nonzero()


def taken_for_true(_model, h):
    return 2 * h if nan(h).any() else h


SICK = [
    *(kept_in_a_dict, kept_in_a_list, chosen_by_argmax, chosen_among_infinities, chosen_by_topk),
    *(made_whole_numbers, compared, asked_by_python, counted, taken_for_true),
]


def kept_entropy(model, h):
    zero = 0 * h.detach()
    model.memory["entropy"] = (zero * zero.log()).sum()
    return h


def decided_by_entropy(_model, h):
    zero = 0 * h.detach()
    return 2 * h if (zero * zero.log()).sum() > 0 else h


def test_nan_of_a_mere_minus_infinity_is_none_that_is_meant(examine):
    for then in kept_entropy, decided_by_entropy:
        assert blamed(examine(Hiding(then), BATCH)) == ("numerics", "", "log", "log-of-zero")


def test_a_weight_that_the_forward_spoils_is_found(examine):
    def spoil(model, h):
        model.table.weight.data = nan(h).mean() * model.table.weight.data
        return h

    assert blamed(examine(Hiding(spoil), BATCH)) == NAN


@pytest.mark.parametrize("then", SICK, ids=lambda then: then.__name__)
def test_what_hides_is_found(examine, then):
    report = examine(Hiding(then), BATCH)
    assert blamed(report) == NAN
    assert any(note.startswith("What the step returns is finite") for note in report.notes)


def masked(model, h):
    model.memory["mask"] = torch.full((4, 4), -math.inf).triu(1)
    model.memory["smallest"], model.memory["missing"] = torch.tensor(math.inf), torch.full((3,), math.nan)
    return (h + model.memory["mask"]).softmax(-1)


def checked_beside(_model, h):
    ratio = nan(h)
    return torch.where(torch.isfinite(ratio) & (ratio > 0), h, -h)


def guarded(_model, h):
    return h if not torch.isfinite(nan(h)).all() else 2 * h


def logarithms_of_zero(model, h):
    return model.table(torch.log(h.relu()).argmax(-1))


def infinite_and_compared(_model, h):
    return torch.where(h / (h - h) > 2, h, -h)


SOUND = [masked, checked_beside, guarded, logarithms_of_zero, infinite_and_compared]


@pytest.mark.parametrize("then", SOUND, ids=lambda then: then.__name__)
def test_what_is_meant_is_healthy(examine, then):
    assert blamed(examine(Hiding(then), BATCH)) == ("healthy",)


def test_a_choice_that_only_fp16_spoils_is_silent(examine):
    def route(model, h):
        return model.table((h.half() * 6e4 * 100).argmax(-1))

    report = examine(Hiding(route), BATCH)
    assert blamed(report) == ("silent", "", "mul", "elementwise-overflow")


def squares(h):
    """More than fp16 holds."""
    return (300 + h.abs()) * (300 + h.abs())


def grows(_model, h):
    last = squares(h).amax()
    return h if not 2 * last > last else 2 * h


def stays_below(_model, h):
    return 2 * h if squares(h).amax() < 1e6 else h


def equals(_model, h):
    return torch.where(squares(h) == squares(h).amax(), h, 2 * h)


@pytest.mark.parametrize("then", [grows, stays_below, equals], ids=lambda then: then.__name__)
def test_a_decision_that_fp32_makes_otherwise_is_silent(examine, then):
    """No number that fp16 holds would have led to the decision that its Inf led to, or all of them would."""
    assert blamed(examine(Hiding(then), BATCH)) == ("silent", "", "mul", "elementwise-overflow")


def test_a_loss_that_an_overflow_decides_is_silent(examine):
    def loss(output, _):
        return output.mean() * (2 if output.half().mul(1e5).abs().amax() < 1e8 else 1)

    report = examine(Hiding(lambda _model, h: h), BATCH, loss=loss)
    assert blamed(report)[0] == "silent"


def test_a_silent_overflow_comes_before_the_gradients(examine):
    def shrink(model, h):
        return torch.cat([1e-3 * model.layer(h), 1e5 * (h / squares(h))])

    report = examine(Hiding(shrink), BATCH, loss=lambda output, _: output.float().mean() * 1e9)
    assert blamed(report) == ("silent", "", "mul", "silent-overflow")
    assert report.bad_gradients
    assert "gradient-overflow" in [diagnosis.cause.code for diagnosis in report.also]


def test_an_overflow_that_decides_as_fp32_does_is_healthy(examine):
    assert blamed(examine(Hiding(lambda _model, h: h if squares(h).amax() > 1e4 else 2 * h), BATCH)) == ("healthy",)


def test_an_output_far_from_fp32_clears_nothing(examine):
    """Code that asks for an Inf is meant to get one, but what it returns then is not what fp32 returns."""
    report = examine(Hiding(lambda _model, h: 2 * h if squares(h).isinf().any() else h), BATCH)
    assert report.verdict == "cannot-tell"
    assert report.headline.startswith("The output is finite, but 99.9 % off fp32's under fp16 autocast")


def test_other_random_numbers_are_no_error(examine):
    """torch draws other normal numbers in half precision."""
    batch = {"x": normal(8, 4)}
    assert blamed(examine(Hiding(lambda _model, h: h + 9 * torch.randn_like(h)), batch)) == ("healthy",)


def test_nan_that_a_closure_keeps_clears_nothing(examine):
    kept = []

    def keep(_model, h):
        kept.append(nan(h.detach()))
        return torch.where(torch.isfinite(kept[-1]), kept[-1], h)

    report = examine(Hiding(keep), BATCH)
    assert report.verdict == "cannot-tell"
    assert "still held" in report.headline


def test_nan_that_leaves_torch_clears_nothing(examine):
    def measure(model, h):
        model.memory["mean"] = nan(h).mean().item()
        return h

    report = examine(Hiding(measure), BATCH)
    assert report.verdict == "cannot-tell"
    assert "div (" in report.headline


def test_nan_of_an_overflow_that_leaves_torch_clears_nothing(examine):
    def measure(model, h):
        squares = (h * 1000) ** 2
        model.memory["spread"] = (squares.half() - squares.half()).mean().item()
        return h

    assert "Inf, and from it NaN," in examine(Hiding(measure), BATCH).headline
