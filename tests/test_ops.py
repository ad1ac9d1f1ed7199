"""The table of ops: its names are torch's, its lengths are what torch sums, and all products are explained alike."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from one_test import for_each
from sick_models.case import randn
from torch import nn

from nandoctor import ops
from nandoctor.autocast.kernels import LISTS
from nandoctor.tracing.dispatch_hook import intercepting

TABLES = {
    name: table for name, table in vars(ops).items() if name.isupper() and isinstance(table, frozenset | dict)
}  # fmt: skip

# Each with its op and a call on tensors that `make` gives: all ones, or large random numbers.
LINEAR = {
    "matmul": lambda make: make(3, 5) @ make(5, 4),
    "inner": lambda make: torch.inner(make(3, 5), make(4, 5)),
    "mm": lambda make: torch.mm(make(3, 5), make(5, 4)),
    "bmm": lambda make: torch.bmm(make(2, 3, 5), make(2, 5, 4)),
    "linalg_matrix_power": lambda make: torch.linalg.matrix_power(make(5, 5), 2),
    "mv": lambda make: torch.mv(make(3, 5), make(5)),
    "dot": lambda make: torch.dot(make(5), make(5)),
    "vdot": lambda make: torch.vdot(make(5), make(5)),
    "linalg_vecdot": lambda make: torch.linalg.vecdot(make(6, 3), make(6, 3), dim=0),
    "tensordot": lambda make: torch.tensordot(make(2, 3, 5), make(5, 3, 4), dims=([1, 2], [1, 0])),
    "einsum": lambda make: torch.einsum("b i k, j k h -> b j", make(2, 3, 5), make(4, 5, 6)),
    "linear": lambda make: F.linear(make(3, 5), make(4, 5)),
    "bilinear": lambda make: F.bilinear(make(3, 5), make(3, 6), make(4, 5, 6)),
    "addmm": lambda make: torch.addmm(make(3, 4), make(3, 5), make(5, 4), beta=0),
    "_addmm_activation": lambda make: torch._addmm_activation(make(4), make(3, 5), make(5, 4), beta=0),
    "addmv": lambda make: torch.addmv(make(3), make(3, 5), make(5), beta=0),
    "baddbmm": lambda make: torch.baddbmm(make(2, 3, 4), make(2, 3, 5), make(2, 5, 4), beta=0),
    "addbmm": lambda make: torch.addbmm(make(3, 4), make(2, 3, 5), make(2, 5, 4), beta=0),
    "addr": lambda make: torch.addr(make(3, 4), make(3), make(4), beta=0),
    "outer": lambda make: torch.outer(make(3), make(4)),
    "chain_matmul": lambda make: torch.ops.aten.chain_matmul([make(3, 5), make(5, 2), make(2, 4)]),
    "linalg_multi_dot": lambda make: torch.linalg.multi_dot([make(3, 5), make(5, 2), make(2, 4)]),
    "conv1d": lambda make: F.conv1d(make(2, 6, 9), make(4, 3, 3), groups=2),
    "conv2d": lambda make: F.conv2d(make(2, 3, 9, 9), make(4, 3, 3, 2)),
    "conv3d": lambda make: F.conv3d(make(1, 2, 5, 5, 5), make(4, 2, 3, 2, 2)),
    "conv_transpose1d": lambda make: F.conv_transpose1d(make(2, 6, 9), make(6, 4, 5), stride=2),
    "conv_transpose2d": lambda make: F.conv_transpose2d(make(2, 6, 9, 9), make(6, 4, 3, 4), groups=2),
    "conv_transpose3d": lambda make: F.conv_transpose3d(make(1, 2, 5, 5, 5), make(2, 4, 3, 3, 3), dilation=2, stride=2),
    "conv_tbc": lambda make: torch.conv_tbc(make(9, 2, 3), make(3, 3, 4), 0 * make(4)),
    "convolution": lambda make: torch.convolution(
        make(2, 6, 9), make(6, 4, 5), None, [2], [0], [1], True, [0], 1
    ),
    "_convolution": lambda make: torch._convolution(
        make(2, 3, 9), make(4, 3, 3), None, [1], [0], [1], False, [0], 1, False, False, False, False
    ),
}  # fmt: skip
UNTOLD = {
    "linalg_vecdot", "tensordot", "einsum", "addbmm", "addr", "outer", "chain_matmul", "linalg_multi_dot",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "convolution", "_convolution",
}  # fmt: skip
BOUNDED = {
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention", "_native_multi_head_attention",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
}  # fmt: skip
EXAMPLES = ("matmul", "dot", "einsum", "linear", "addmm", "conv2d", "conv_transpose2d", "tensordot")


def ones(*shape):
    return torch.ones(*shape)


def large(*shape):
    return 500 * randn(*shape, seed=sum(shape)).half()


def recorded(run):
    calls = []

    def record(call, proceed):
        calls.append(call)
        return proceed(call)

    with intercepting(record):
        result = run()
    return calls, result


@for_each(TABLES)
def test_names_are_those_of_torch(table):
    assert [name for name in TABLES[table] if not hasattr(torch.ops.aten, name)] == []


def test_every_op_that_autocast_lowers_is_a_product():
    names = [*LISTS["lower_precision"], *LISTS["cudnn_rnn"]]
    listed = {name.partition(".")[0] for name in names}
    elementwise = {"prelu", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}
    assert listed - elementwise <= ops.PRODUCTS.keys()


def test_every_product_is_called_here():
    assert {*LINEAR, *BOUNDED} == ops.PRODUCTS.keys()


@for_each(LINEAR)
def test_terms_are_as_many_as_ones_that_are_summed(name):
    calls, result = recorded(lambda: LINEAR[name](ones))
    call = next(call for call in calls if call.name == name)
    assert ops.num_terms(name, dict(call.arguments())) == (None if name in UNTOLD else result.max())


class Only(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            return self.call(lambda *shape: large(*shape) + 0 * x.half())


@pytest.mark.parametrize("name", EXAMPLES)
def test_overflow_is_explained_as_that_of_matmul(name, replay):
    report = replay(Only(LINEAR[name]), {"x": torch.ones(1)}, mode="train", fixes=False)
    cause = report.cause
    assert (report.origin.op, cause.code) == (name, "matmul-overflow")
    kinds = Counter(item.name.partition("_")[0] for item in cause.evidence)
    assert kinds["length"] == (name not in UNTOLD)
    assert kinds["absmax"] >= 2
    assert {item.name for item in cause.evidence} >= {"would_be", "num_bad"}
