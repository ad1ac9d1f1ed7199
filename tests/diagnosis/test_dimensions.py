"""Dimensions get the names that the ops around a tensor give them; constants are found in the format of their use."""

import pytest
import torch
import torch.nn.functional as F
from made_traces import trace_ops
from strangers.visits import Lifted
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

from nandoctor.diagnosis.dimensions import name_dimensions
from nandoctor.diagnosis.eps_audit import audit
from nandoctor.dumps.classify import SecondMoment
from nandoctor.engine.updates import measure_slots
from nandoctor.evidence.formats import FP16

HEADS, CHANNELS = 2, 8


class Marked(nn.Module):
    """A model whose function marks the tensor to name by taking its tangent."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.enter = nn.Linear(CHANNELS, CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x):
        return self.function(self, x)

    def split(self, x):
        return self.enter(x).view(*x.shape[:-1], HEADS, CHANNELS // HEADS).transpose(1, 2)


def names_in(function, shape):
    """Return the names of the tensor whose tangent the function takes."""
    ops = trace_ops(Marked(function), torch.rand(shape))
    tangent = next(op for op in ops if op.op == "tan")
    return name_dimensions(tangent.order, tangent.outputs[0].shape, ops)


def own_attention(m, x):
    q, k = m.split(x), m.split(x)
    scores = (q @ k.transpose(-2, -1)).tan() / 2
    return (F.dropout(scores.softmax(-1), 0.1, training=True) @ m.split(x)).sum()


def attention_along_rows(m, x):
    """Attend along the rows of a map, which are no heads."""
    rows = m.conv(x).permute(0, 2, 3, 1)
    return ((rows @ rows.mT).tan().softmax(-1) @ rows).sum()


IMAGE, TEXT = (2, CHANNELS, 5, 6), (2, 5, CHANNELS)
SPACE = ("", "channel", "height", "width")
NAMED = {
    "a convolution": (lambda m, x: m.conv(x).tan(), IMAGE, SPACE),
    "later, after a cast": (lambda m, x: (m.conv(x).relu() * 2).double().contiguous().tan(), IMAGE, SPACE),
    "a function of resizing": (lambda m, x: F.interpolate(x, scale_factor=2.0, mode="bilinear").tan(), IMAGE, SPACE),
    "in one dimension": (lambda m, x: F.avg_pool1d(x.tan(), 2), (2, CHANNELS, 9), ("", "channel", "position")),
    "batch norm": (lambda m, x: F.batch_norm(x.tan(), None, None, training=True), IMAGE[:3], ("", "channel", "")),
    "a linear layer": (lambda m, x: m.enter(x).tan(), TEXT, ("", "", "feature")),
    "layer norm": (lambda m, x: F.layer_norm(x.tan(), (CHANNELS,)), TEXT, ("", "", "feature")),
    "attention by hand": (own_attention, TEXT, ("", "head", "query", "key")),
    "rows, which are no heads": (attention_along_rows, IMAGE, ("", "", "query", "key")),
    "one head": (lambda m, x: torch.bmm(m.enter(x), x.mT).tan().softmax(2) @ x, TEXT, ("", "query", "key")),
    "torch's attention": (lambda m, x: attend(*[m.split(x).tan()] * 3), TEXT, ("", "head", "query", "feature")),
    "classes": (lambda m, x: F.cross_entropy(x.tan(), torch.tensor([0, 1])), (2, 7), ("", "class")),
}  # fmt: skip
UNNAMED = {
    "the batch": (lambda m, x: x.tan(), IMAGE),
    "a convolution's, moved": (lambda m, x: m.conv(x).transpose(2, 3).tan(), (2, CHANNELS, 5, 5)),
    "similarities, without values": (lambda m, x: (m.enter(x) @ m.enter(x).T).tan().softmax(-1), (5, CHANNELS)),
    "values weighted along the rows": (lambda m, x: (m.enter(x) @ m.enter(x).mT).tan().softmax(1) @ x, TEXT),
    "no space": (lambda m, x: torch.atleast_2d(x).tan(), (4, 4)),
}


@pytest.mark.parametrize("case", NAMED)
def test_ops_name_the_dimensions_that_they_define(case):
    function, shape, names = NAMED[case]
    assert names_in(function, shape) == names


@pytest.mark.parametrize("case", UNNAMED)
def test_nothing_is_said_where_no_op_tells(case):
    assert names_in(*UNNAMED[case]) == ()


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
    assert use.source.file == __file__


@pytest.mark.parametrize(("dtype", "effect"), [(torch.float16, "zero"), (torch.float32, "normal")])
def test_an_optimizers_eps_is_judged_in_the_format_of_its_state(dtype, effect):
    model = nn.Linear(2, 2, bias=False).to(dtype)
    values = torch.tensor([[0.0, 1.0], [4.0, 9.0]], dtype=dtype)
    slots = measure_slots([SecondMoment(index=0, name="", eps=1e-8, values=values)], model)
    use = only(audit((), slots))
    assert (use.place, use.effect) == ("optimizer", effect)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, _: F.leaky_relu(x, 0.01),
        lambda x, _: F.dropout(x, 0.01),
        lambda x, _: x * 1e-3,
        lambda x, _: x.add(x, alpha=1e-3),
        lambda x, _: x + 0.5,
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
