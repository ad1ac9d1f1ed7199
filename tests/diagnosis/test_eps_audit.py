"""Constants are found in the format of their use."""

import pytest
import torch
import torch.nn.functional as F
from made_traces import trace_ops
from strangers.visits import Lifted
from torch import nn

from nandoctor.diagnosis.eps_audit import audit
from nandoctor.dumps.classify import SecondMoment
from nandoctor.engine.updates import measure_slots
from nandoctor.evidence.formats import FP16


def audited(function):
    return audit(trace_ops(Lifted(function), torch.linspace(-1, 1, 16).view(2, 8)))


@pytest.mark.parametrize(
    ("function", "op", "value"),
    [
        (lambda x, _: x / torch.maximum(x.abs(), torch.tensor(1e-8)), "maximum", 1e-8),
        (lambda x, _: x / x.masked_fill(x == 0, 1e-8), "masked_fill", 1e-8),
        (lambda x, _: F.pairwise_distance(x, x, eps=1e-8), "pairwise_distance", 1e-8),
    ],
)
def test_a_constant_of_an_fp16_tensor_is_zero(function, op, value):
    (use,) = audited(function)
    assert (use.op, use.dtype, use.rounded, use.effect) == (op, FP16, 0.0, "zero")
    assert use.value == pytest.approx(value)
    assert use.source.file == __file__


@pytest.mark.parametrize(("dtype", "effect"), [(torch.float16, "zero"), (torch.float32, "normal")])
def test_an_optimizers_eps_is_judged_in_the_format_of_its_state(dtype, effect):
    model = nn.Linear(2, 2, bias=False).to(dtype)
    values = torch.tensor([[0.0, 1.0], [4.0, 9.0]], dtype=dtype)
    slots = measure_slots([SecondMoment(index=0, name="", eps=1e-8, values=values)], model)
    (use,) = audit((), slots)
    assert (use.place, use.effect) == ("optimizer", effect)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, _: F.leaky_relu(x, 0.01),
        lambda x, _: F.dropout(x, 0.01),
        lambda x, _: x * 1e-3,
        lambda x, _: x.add(x, alpha=1e-3),
        lambda x, _: x + 0.5,
        lambda x, _: x + 1e-4,
        lambda x, _: x - 1e-3 * x.detach(),
        lambda x, _: x / 1e-2,
        lambda x, _: x + 1e-3 * x.float().mean(),  # a number that was computed
        lambda x, _: x.masked_fill(x < 0, 1e-3) @ x.T,
        lambda x, _: x.clamp(-1e-3, 0.5),
        lambda x, _: torch.lerp(x, x, 1e-3),
    ],
)
def test_what_is_no_eps_is_not_listed(function):
    assert audited(function) == ()


@pytest.mark.parametrize(
    ("index", "shape", "name", "frozen", "found"),
    [(0, (3, 2), "", False, "0.weight"), (0, (1, 3), "", True, "1.weight"), (0, (1,), "1.bias", False, "1.bias")],
)  # by the model's order, by that of what is trained, and by the optimizer's own name
def test_moments_get_the_names_of_weights(index, shape, name, frozen, found):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(requires_grad=not frozen)
    (slot,) = measure_slots([SecondMoment(index=index, name=name, eps=1e-8, values=torch.zeros(shape))], model)
    assert slot.parameter == found
