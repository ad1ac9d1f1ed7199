"""Second moments measured, and given the names of the model's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nandoctor.dumps.optimizer_state import SecondMoment
from nandoctor.engine.eps_constants import measure_slots
from nandoctor.evidence.formats import FP16


def moment(index, *shape, name="", dtype=torch.float16):
    return SecondMoment(index=index, name=name, eps=1e-8, values=torch.zeros(shape, dtype=dtype))


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def names(moments, model):
    return [slot.parameter for slot in measure_slots(moments, model, FP16)]


def test_the_numbers_are_exact(model):
    values = torch.tensor([0.0, 6e-8, 1.0], dtype=torch.float16)
    (slot,) = measure_slots([SecondMoment(index=1, name="", eps=1e-8, values=values)], model, FP16)
    assert slot.moment.dtype is FP16
    assert slot.moment.counts.num_zero == 1
    assert slot.moment.counts.smallest == pytest.approx(6e-8, rel=0.01)


def test_names_go_by_the_order_of_the_model(model):
    assert names([moment(0, 3, 2), moment(3, 1)], model) == ["0.weight", "1.bias"]


def test_names_go_by_the_order_of_what_is_trained(model):
    model[0].requires_grad_(requires_grad=False)
    assert names([moment(0, 1, 3), moment(1, 1)], model) == ["1.weight", "1.bias"]


def test_names_that_the_optimizer_knows_come_first(model):
    assert names([moment(0, 1, name="1.bias"), moment(1, 3, name="0.bias")], model) == ["1.bias", "0.bias"]


def test_an_order_that_does_not_fit_gives_no_names(model):
    assert names([moment(0, 3, 2), moment(1, 1, 3)], model) == ["", ""]
    assert names([moment(9, 1)], model) == [""]
