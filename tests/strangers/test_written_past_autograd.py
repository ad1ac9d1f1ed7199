"""Writes that autograd does not count, tensors that lie in another's memory, and memory that is not filled yet."""

from __future__ import annotations

import math

import torch
from torch import nn

from nandoctor.tracing import dispatch_hook
from strangers.visits import Between, blamed, line, louder, normal

HEALTHY = ("healthy",)


class Scaled(nn.Module):
    """A weight and a running average, read and written by way of `.data`."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("average", torch.ones(8))


def test_an_activation_that_is_written_to_through_data(examine):
    class Boosted(nn.Module):
        def forward(self, x):
            x = x.clone()
            x.data[:, :4] *= 1e6
            return x

    report = examine(Between(Boosted()), {"x": normal(4, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")
    assert line(report) == "x.data[:, :4] *= 1e6"


def test_a_running_average_that_is_written_to_through_data(examine):
    class Averaging(Scaled):
        def forward(self, x):
            self.average.data.copy_(self.inner(x).mean(0) * 1e7)
            return self.inner(x + self.average)

    report = examine(Averaging(), {"x": normal(4, 8)})
    assert blamed(report) == ("precision", "", "mul", "elementwise-overflow")


def test_a_nonfinite_weight_that_is_read_through_data(examine):
    class Frozen(Scaled):
        def forward(self, x):
            return self.inner(x * self.scale.data)

    model = Frozen()
    with torch.no_grad():
        model.scale[3] = math.nan
    assert blamed(examine(model, {"x": normal(4, 8)})) == ("state", "", None, "poisoned-weights")


def test_a_nonfinite_weight_that_is_mended_through_data(examine):
    class Mending(Scaled):
        def forward(self, x):
            self.scale.data.nan_to_num_(1.0)
            return self.inner(x * self.scale)

    model = Mending()
    with torch.no_grad():
        model.scale[3] = math.nan
    assert blamed(examine(model, {"x": normal(4, 8)})) == HEALTHY


def test_a_scratch_tensor_that_is_filled_through_data(examine):
    class Scratch(nn.Module):
        def forward(self, x):
            result = torch.empty_like(x).fill_(math.nan)
            result.data[:, :4] = x[:, :4]
            result.data[:, 4:] = x[:, 4:]
            return result

    assert blamed(examine(Between(Scratch()), {"x": normal(4, 8)})) == HEALTHY


def test_a_constant_of_the_codes_own_that_is_nan(examine):
    class Tabled(Scaled):
        def forward(self, x):
            return self.inner(x) * torch.tensor([1.0, math.nan] * 4)

    report = examine(Tabled(), {"x": normal(4, 8)})
    assert (report.verdict, report.origin.place.module, report.origin.elements.kinds) == ("numerics", "", ("nan",))
    assert "math.nan" in line(report)


def test_what_cannot_be_watched_is_said(examine):
    class Shy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = louder(nn.Linear(8, 8), 1e4)

        def forward(self, x):
            if dispatch_hook._handlers.stack:
                raise RuntimeError("somebody is watching")
            return self.inner(x * 30)

    report = examine(Between(Shy()), {"x": 10 * normal(5, 8)})
    assert report.first_nonfinite.place.module == "middle.inner"
    assert any("could not be traced (RuntimeError: somebody is watching)" in note for note in report.notes)
