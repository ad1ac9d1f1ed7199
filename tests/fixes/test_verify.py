"""What counts as a fix: finite, and in agreement with fp32. Things that only look like fixes do not."""

import math
from types import SimpleNamespace

import pytest
import torch
from made_traces import make_step
from torch import nn

import nandoctor
from nandoctor.autocast.policy import Policy
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.changes.setting import UseFormat
from nandoctor.engine.runner import CLOSELY
from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.formats import BF16
from nandoctor.fixes.agreement import BF16_TOLERANCE, TOLERANCE
from nandoctor.fixes.budget import BudgetSpent, TrialBudget
from nandoctor.fixes.verify import Known, Trials


class Attention(nn.Module):
    """Causal attention by hand, [n, t, 8] -> same; the scores of large inputs pass 65504."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8, bias=False)
        self.key = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        q, k = self.query(x), self.key(x)
        scores = q @ k.transpose(-2, -1)
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = (scores / 8**0.5).masked_fill(hidden, float("-inf"))
        return self.head(scores.softmax(-1) @ x)


@pytest.fixture
def step():
    torch.manual_seed(0)
    model = Attention()
    x = torch.randn(2, 6, 8)
    x[1] *= 600
    return make_step(model, x)


def make_trials(step, *, max_trials=None, time_s=None, numerics=False):
    return Trials(step, TrialBudget(max_trials=max_trials, time_s=time_s), numerics=numerics)


def site_of(step, op, nth=0):
    trace = step.run(watch=CLOSELY).trace
    found = [o for o in trace.ops if o.op == op][nth]
    return OpSite(module=found.module, type=found.type, op=op, nth=found.nth, source=found.source)


def test_the_unchanged_step_is_run_once_and_not_if_known(step):
    trials = make_trials(step)
    as_it_is = UseFormat(format=step.low)
    assert not trials.run().values_finite
    assert not trials.look(as_it_is).finite
    assert trials._budget.num_run == 1
    known = Trials(step, TrialBudget(max_trials=0), numerics=False, known=Known(fails=True))
    assert known.look(as_it_is) == trials.look(as_it_is)


@pytest.mark.parametrize("op", ["softmax", "masked_fill", "div"])
def test_nan_to_num_on_the_scores_is_finite_and_no_fix(step, op):
    """0 in place of NaN, and large numbers in place of Inf, let a query see what it must not, or not what it must."""
    argument = "self"
    edit = ClampArgument(site=site_of(step, op), argument=argument, low=-65504.0, high=65504.0, nan=True)
    judgement = make_trials(step).judge(edit)
    assert judgement.outcome.finite
    assert not judgement.passes


def test_a_clamp_that_cuts_values_off_is_no_fix(step):
    edit = ClampArgument(site=site_of(step, "matmul"), argument="self", low=-0.1, high=0.1)
    judgement = make_trials(step).judge(edit)
    assert judgement.outcome.finite
    assert judgement.outcome.max_rel_err > 0.1
    assert not judgement.passes


def test_nothing_is_run_twice(step):
    trials = make_trials(step)
    edit = KeepModule(module="", children=False)
    assert trials.passes(edit)
    runs = trials._budget.num_run
    assert trials.passes(edit)
    assert trials._budget.num_run == runs


@pytest.mark.slow
def test_a_spent_budget_is_told(tmp_path):
    report = nandoctor.replay("sample_dumps/residual_stream.pth", max_trials=5).report
    assert any("budget" in note for note in report.search_notes)
    unspent = nandoctor.replay("sample_dumps/residual_stream.pth", max_trials=0).report
    assert not any("No change was found" in note for note in unspent.search_notes)  # nobody looked
    assert nandoctor.replay("sample_dumps/residual_stream.pth", fixes=False).report.fixes == ()


class Noisy(nn.Module):
    """Divides fp32's own rounding noise by a tiny eps: fp32 is no truth there, float64 is."""

    def __init__(self):
        super().__init__()
        self.even = nn.Linear(2, 4, bias=False)

    def forward(self, x):
        h = self.even(x)
        spread = h.std(dim=0, keepdim=True)
        return (h - h.mean(dim=0, keepdim=True)) / (spread + 1e-8)


def test_what_fp32_itself_is_unsure_of_need_not_agree():
    torch.manual_seed(0)
    model = Noisy()
    step = make_step(model, torch.full((3, 2), 0.3))
    trials = make_trials(step)
    assert not trials.judge().outcome.finite
    edit = SetArgument(site=site_of(step, "add"), argument="other", was=1e-8, value=1e-4)
    assert trials.passes(edit)


def test_numerics_is_judged_against_fp32_with_the_same_change():
    class Logs(nn.Module):
        def forward(self, x):
            return torch.log(x)

    model = Logs()
    x = torch.tensor([[0.0, 1.0, 1e-3]])
    step = make_step(model, x)
    site = site_of(step, "log")
    trials = make_trials(step, numerics=True)
    assert trials.passes(ClampArgument(site=site, argument="self", low=1e-6))
    blunt = trials.judge(ClampArgument(site=site, argument="self", low=0.5))  # changes the log of 1e-3, which was fine
    assert blunt.outcome.finite
    assert not blunt.passes
    assert not trials.passes(KeepModule(module=""))
    assert not trials.passes(UseFormat(format=BF16))
    assert math.isfinite(blunt.outcome.max_rel_err)


def test_the_end_of_memory_is_not_the_changes_fault():
    def run(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    budget = TrialBudget(10)
    step = SimpleNamespace(model=torch.nn.Linear(1, 1), loss=None, loss_scale=1.0, run=run)
    with pytest.raises(BudgetSpent):
        Trials(step, budget, numerics=False).judge()
    assert budget.out_of_memory


class Residual(nn.Module):
    """Rows over their largest value, through a stack of layers, [n, 8] -> [n, 4]; bf16 loses over 1 % on the way."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=1.5)

    def forward(self, x):
        x = x / x.abs().amax(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x).tanh()
        return x[:, :4]


def make_residual(*, empty_row, coupled=False):
    torch.manual_seed(0)
    model = Residual()
    if coupled:
        model.layers.append(nn.BatchNorm1d(8))
    x = torch.randn(6, 8)
    if empty_row:
        x[3] = 0.0
    return make_step(model, x, Policy(name="cuda", format=BF16))


@pytest.mark.parametrize("coupled", [False, True])
def test_what_bf16_loses_without_the_failure_is_allowed_for(coupled):
    """Where the failure takes every sample with it, what bf16 loses elsewhere cannot be measured."""
    step = make_residual(empty_row=True, coupled=coupled)
    trials, site = make_trials(step, numerics=True), site_of(step, "div")
    guarded = trials.judge(ClampArgument(site=site, argument="other", low=1e-6))
    assert guarded.passes
    assert TOLERANCE < guarded.outcome.max_rel_err < BF16_TOLERANCE
    if not coupled:
        assert not trials.judge(ClampArgument(site=site, argument="other", low=1.5)).passes


def test_what_a_finite_step_is_off_by_is_not_allowed_for():
    """It may be the failure: values that overflowed on their way."""
    step = make_residual(empty_row=False)
    trials = make_trials(step)
    assert trials.judge().outcome.max_rel_err > TOLERANCE
    assert not trials.judge().passes
