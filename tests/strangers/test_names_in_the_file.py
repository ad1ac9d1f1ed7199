"""Arrays with misleading names: inputs that are called like outputs, targets that nobody would know for one."""

from __future__ import annotations

import math

import torch
from torch import nn

import nandoctor
from strangers.visits import blamed, louder, normal

HEALTHY = ("healthy",)


class Scorer(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.rank = louder(nn.Linear(8, 3), factor)

    def forward(self, scores):
        return self.rank(scores)


class Locator(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Linear(8, 3)

    def forward(self, waypoints):
        return self.place(waypoints)


def with_a_nan(values):
    values = values.clone()
    values[1, 2] = math.nan
    return values


def test_an_input_that_is_called_scores(examine):
    report = examine(Scorer(1e4), {"scores": 100 * normal(4, 8)})
    assert blamed(report) == ("precision", "rank", "linear", "matmul-overflow")


def test_a_nonfinite_input_of_an_unheard_of_name_is_no_output(examine):
    report = examine(Locator(), {"waypoints": with_a_nan(normal(4, 8))})
    assert blamed(report) == ("input", "", None, "poisoned-input")
    assert report.origin.elements.samples == (1,)


def test_a_nonfinite_array_that_the_user_names_as_an_input(examine):
    report = examine(Locator(), {"z": with_a_nan(normal(4, 8))}, inputs="waypoints=z")
    assert blamed(report) == ("input", "", None, "poisoned-input")


def test_a_target_with_gaps_that_has_the_shape_of_the_output(examine):
    """Gauges that were down hold NaN, and the loss leaves them out."""

    def loss(output, batch):
        known = ~batch["gauge"].isnan()
        return (output.float()[known] - batch["gauge"][known]).abs().mean()

    batch = {"waypoints": normal(4, 8), "gauge": with_a_nan(normal(4, 3))}
    assert blamed(examine(Locator(), batch, loss=loss)) == HEALTHY


def test_gaps_that_are_multiplied_away_and_are_not_gone(examine):
    def loss(output, batch):
        known = (~batch["gauge"].isnan()).float()
        return ((output.float() - batch["gauge"]).abs() * known).sum() / known.sum()

    batch = {"waypoints": normal(4, 8), "gauge": with_a_nan(normal(4, 3))}
    assert blamed(examine(Locator(), batch, loss=loss)) == ("input", "", None, "poisoned-target")


def test_of_two_saved_outputs_the_nonfinite_one_is_compared(examine):
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.classify = nn.Linear(8, 3)
            self.locate = louder(nn.Linear(8, 4), 1e4)

        def forward(self, x):
            return {"pred_logits": self.classify(x), "pred_boxes": self.locate(x)}

    model, x = Detector(), 100 * normal(2, 8).abs()
    with torch.no_grad():
        model.locate.weight.abs_()
    saved = {"pred_logits": model.classify(x).detach(), "pred_boxes": torch.full((2, 4), math.inf)}
    report = examine(model, {"x": x, **saved})
    assert (report.reproduction.output, report.reproduction.grade) == ("pred_boxes", "exact")
    assert blamed(report) == ("precision", "locate", "linear", "matmul-overflow")


class Reconstruction(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(8, 8)

    def forward(self, x):
        return {"recon": torch.log(self.read(x).abs() + x), "aux": x}


def off_recon(output, batch):
    return (output["recon"].float() - batch["recon" if "gaps" in batch else "x"]).square().mean()


def test_an_output_that_the_loss_reads_by_name_is_compared(examine):
    model, x = Reconstruction(), normal(4, 8) - 1
    with nandoctor.cuda_autocast():
        recon = model(x)["recon"].detach()
    report = examine(model, {"x": x, "recon": recon}, loss=off_recon)
    assert (report.reproduction.output, report.reproduction.grade) == ("recon", "exact")


def test_a_target_of_the_name_of_an_output_is_not_compared(examine):
    batch = {"x": normal(4, 8).abs(), "recon": with_a_nan(normal(4, 8)), "gaps": torch.ones(4)}
    assert examine(Reconstruction(), batch, loss=off_recon).reproduction.grade == "no-reference"
