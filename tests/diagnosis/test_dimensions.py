"""Dimensions get the names that the ops around a tensor give them, and none where these do not tell."""

import pytest
import torch
import torch.nn.functional as F
from made_traces import trace_ops
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

from nandoctor.diagnosis.dimensions import name_dimensions

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
