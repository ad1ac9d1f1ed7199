"""The eps audit on real runs: constants are found, in the format that they were really used in, and nothing else is."""

import pytest
import torch
import torch.nn.functional as F
from made_traces import trace_ops
from strangers.visits import Lifted
from torch import nn

from nandoctor.diagnosis.eps_audit import audit
from nandoctor.dumps.optimizer_state import SecondMoment
from nandoctor.engine.optimizer_slots import measure_slots
from nandoctor.evidence.formats import FP16


def audited(function):
    """The audit of a function of an fp16 tensor."""
    return audit(trace_ops(Lifted(function), torch.linspace(-1, 1, 16).view(2, 8)))


def only(uses):
    (use,) = uses
    return use


@pytest.mark.parametrize(
    ("function", "op", "value"),
    [
        (lambda x, _: x / (x.abs() + 1e-8), "add", 1e-8),
        (lambda x, _: x / x.abs().clamp(min=1e-8), "clamp", 1e-8),
        (lambda x, _: x / torch.maximum(x.abs(), torch.tensor(1e-8)), "maximum", 1e-8),
        (lambda x, _: x / x.masked_fill(x == 0, 1e-8), "masked_fill", 1e-8),
        (lambda x, _: torch.log(torch.where(x > 0, x, 1e-8)), "where", 1e-8),
        (lambda x, _: F.pairwise_distance(x, x, eps=1e-8), "pairwise_distance", 1e-8),
    ],
)
def test_a_constant_of_an_fp16_tensor_is_zero(function, op, value):
    use = only(audited(function))
    assert (use.op, use.dtype, use.rounded, use.effect) == (op, FP16, 0.0, "zero")
    assert use.value == pytest.approx(value)
    assert "test_eps_audit.py" in use.source.file


@pytest.mark.parametrize(("dtype", "effect"), [(torch.float16, "zero"), (torch.float32, "normal")])
def test_an_optimizers_eps_is_judged_in_the_format_of_its_state(dtype, effect):
    model = nn.Linear(2, 2, bias=False).to(dtype)
    values = torch.tensor([[0.0, 1.0], [4.0, 9.0]], dtype=dtype)
    slots = measure_slots([SecondMoment(index=0, name="", eps=1e-8, values=values)], model)
    use = only(audit((), slots))
    assert (use.place, use.effect) == ("optimizer", effect)
