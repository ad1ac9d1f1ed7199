"""BatchNorm: statistics that the failing forward wrote, and samples that fail only together."""

import math
from functools import partial

import pytest
import torch
from torch import nn


class Scaled(nn.BatchNorm2d):
    """Normalises pictures, and scales them until what is far from the mean does not fit fp16."""

    def forward(self, picture):
        return super().forward(picture).half() * 12_000.0


@pytest.fixture
def replay(replay):
    return partial(replay, mode="train", max_trials=80)


def outcomes(report, group):
    """What came of the variations of a group, in order."""
    return [trial.outcome.finite for trial in report.counterfactuals if trial.group == group]


def pictures():
    """64 pictures of faint noise, of which one is bright throughout."""
    made = torch.sin(torch.arange(256.0)).reshape(64, 1, 2, 2) / 100
    made[5] = 1.0
    return made


@pytest.mark.usefixtures("every_variation")
@pytest.mark.parametrize(("variance", "finite_in_eval"), [(1e6, True), (math.nan, False)])
def test_a_mode_whose_statistics_are_nan_is_not_called_finite(replay, variance, finite_in_eval):
    model = Scaled(1)
    model.running_var.fill_(variance)
    report = replay(model, {"picture": pictures()})
    assert (report.verdict, report.origin.op, report.origin.elements.samples) == ("precision", "mul", (5,))
    assert outcomes(report, "mode") == [False, finite_in_eval]


def test_samples_that_fail_only_together(replay):
    report = replay(Scaled(1), {"picture": pictures()})
    assert outcomes(report, "samples") == [True, True]
    assert report.fixes[0].verified
    assert outcomes(report, "mode") == []  # what the other mode would show is of little use beside a fix
