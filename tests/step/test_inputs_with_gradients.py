"""Gradients of a step's inputs: those that a physics loss takes, and those that the training itself may read."""

import pytest
import torch
from torch import nn

import nandoctor


class Radius(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, points):
        return self.scale * points.pow(2).sum(1).sqrt()


class WritingRadius(Radius):
    def forward(self, points):
        return super().forward(points.mul_(1.0))  # not allowed for a leaf that requires a gradient


def slope(radius, points):
    (gradient,) = torch.autograd.grad(radius.sum(), points, create_graph=True)
    return (gradient[:, 0] / points[:, 0]).log().mean()


def replay(path, points, loss, model=WritingRadius):
    torch.save({"state_dict": model().state_dict(), "points": points}, path)
    return nandoctor.replay(path, model=model, loss=loss, amp_dtype="none", fixes=False).report


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_loss_takes_gradients_of_its_inputs(is_marked, tmp_path):
    points = torch.tensor([[1.0, 2.0], [0.0, 1.0]], requires_grad=is_marked)
    report = replay(tmp_path / "dump.pth", points, slope)
    assert report.verdict == "numerics"
    assert (report.origin.phase, report.origin.op) == ("loss", "div")


@pytest.mark.parametrize(("is_marked", "names"), [(True, ["points"]), (False, [])])
def test_gradients_of_marked_inputs_are_looked_at(is_marked, names, tmp_path):
    points = torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=is_marked)
    report = replay(tmp_path / "dump.pth", points, lambda radius, batch: radius.mean())
    assert [gradient.path for gradient in report.bad_gradients] == names
    assert not any("outside of the model" in note for note in report.notes)


def residual(radius, points):
    (gradient,) = torch.autograd.grad(radius.sum(), points, create_graph=True)
    return (gradient - points.sqrt()).square().mean()


@pytest.mark.parametrize("is_marked", [True, False])
def test_gradients_that_only_the_step_takes_are_not(is_marked, tmp_path):
    points = torch.tensor([[1.0, 2.0], [0.0, 1.0]], requires_grad=is_marked)
    report = replay(tmp_path / "dump.pth", points, residual, model=Radius)
    assert (report.verdict, report.bad_gradients) == ("healthy", ())
