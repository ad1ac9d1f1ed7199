"""Every edit does to the run what it says, and is gone afterwards."""

import copy

import made_traces
import pytest
import torch
from made_traces import FP16_AUTOCAST
from torch import nn

from nandoctor.changes.constant import SetArgument
from nandoctor.changes.keep_fp32 import KeepModule, KeepOp
from nandoctor.changes.places import site_of
from nandoctor.engine.runner import CLOSELY, MODULES_ONLY
from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.formats import FP16, FP32


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-8
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        h = self.inner(x)
        scores = h @ h.T
        return scores / 8.0 + self.eps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.branch = Branch()
        self.register_buffer("running_mean", torch.tensor([0.5]))

    def forward(self, x):
        h = self.branch(self.first(x)) + self.running_mean
        return torch.softmax(h, dim=-1).log()


def make_step(model=None, call=None, **batch):
    torch.manual_seed(0)
    model = model or Net()
    fields = {"forward": lambda arrays: call(model, arrays)} if call else {}
    return made_traces.make_step(model, batch or torch.randn(3, 4), training=False, **fields)


def execute(step, *edits, watch=MODULES_ONLY):
    return step.run(FP16_AUTOCAST, watch, edits)


def dtypes(outcome):
    return {call.module: call.outputs[0].dtype for call in outcome.trace.calls}


def test_keeping_a_forward_alone_leaves_children_under_autocast():
    step = make_step()

    def format_of_inner(*edits):
        ops = execute(step, *edits, watch=CLOSELY).trace.ops
        return next(op.outputs[0].dtype for op in ops if op.place.module == "branch.inner")

    assert format_of_inner(KeepModule(module="branch", children=False)) is FP16
    assert format_of_inner(KeepModule(module="branch")) is FP32
    assert dtypes(execute(step, KeepModule(module="branch", children=False)))["branch"] is FP32


def test_a_module_of_half_weights_can_be_kept_and_gets_them_back():
    step = make_step(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).half(), x=torch.randn(2, 4).half())
    before = copy.deepcopy(step.model.state_dict())
    assert dtypes(execute(step, KeepModule(module="")))[""] is FP32
    after = step.model.state_dict()
    assert all(after[name].dtype is torch.float16 and torch.equal(after[name], before[name]) for name in before)


def test_an_op_without_a_line_is_found_by_its_number():
    step = make_step()
    edit = KeepOp(site=OpSite(module="branch", type="Branch", op="matmul", nth=0))
    assert dtypes(execute(step, edit))["branch"] is FP32
    elsewhere = KeepOp(site=OpSite(module="branch", type="Branch", op="matmul", nth=1))
    assert dtypes(execute(step, elsewhere))["branch"] is FP16


def adds_of_branch(step, *edits):
    ops = execute(step, *edits, watch=CLOSELY).trace.ops
    return [op for op in ops if (op.op, op.place.module) == ("add", "branch")]


def test_a_constant_is_replaced_only_where_it_is_that_number():
    step = make_step()
    (site,) = map(site_of, adds_of_branch(step))
    (op,) = adds_of_branch(step, SetArgument(site=site, argument="other", was=1e-8, value=1.0))
    assert dict(op.scalars)["other"] == 1.0
    other = execute(step, SetArgument(site=site, argument="other", was=1e-6, value=1.0))
    assert torch.equal(other.output, execute(step).output)


def test_everything_is_undone_when_the_forward_raises():
    def call(model, batch):
        model.first(batch["x"])
        raise ZeroDivisionError

    step = make_step(call=call)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute(step, KeepModule(module=""), KeepModule(module="branch", children=False))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in step.model.modules())
    assert not torch.is_autocast_enabled("cpu")
