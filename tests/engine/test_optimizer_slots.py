"""Second moments measured, and given the names of the model's parameters."""

import pytest
import torch
from torch import nn

from nandoctor.dumps.optimizer_state import SecondMoment
from nandoctor.engine.optimizer_slots import measure_slots
from nandoctor.evidence.formats import FP16


def moment(index, *shape, name="", dtype=torch.float16):
    return SecondMoment(index=index, name=name, eps=1e-8, values=torch.zeros(shape, dtype=dtype))


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_the_numbers_are_exact(model):
    values = torch.tensor([0.0, 6e-8, 1.0], dtype=torch.float16)
    (slot,) = measure_slots([SecondMoment(index=1, name="", eps=1e-8, values=values)], model)
    assert slot.moment.dtype is FP16
    assert slot.moment.counts.num_zero == 1
    assert slot.moment.counts.smallest == pytest.approx(6e-8, rel=0.01)


@pytest.mark.parametrize(
    ("moments", "frozen", "names"),
    [
        ([moment(0, 3, 2), moment(3, 1)], False, ["0.weight", "1.bias"]),  # by the model's order
        ([moment(0, 1, 3), moment(1, 1)], True, ["1.weight", "1.bias"]),  # of what is trained
        ([moment(0, 1, name="1.bias"), moment(1, 3, name="0.bias")], False, ["1.bias", "0.bias"]),  # the optimizer's
        ([moment(0, 3, 2), moment(1, 1, 3)], False, ["", ""]),  # of shapes that do not fit that order
        ([moment(9, 1)], False, [""]),
    ],
)
def test_moments_get_the_names_of_weights(moments, frozen, names, model):
    model[0].requires_grad_(requires_grad=not frozen)
    assert [slot.parameter for slot in measure_slots(moments, model)] == names
