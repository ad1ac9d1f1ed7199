"""What counts as a fix: finite, and in agreement with fp32. Things that only look like fixes do not."""

import math
from dataclasses import dataclass

import pytest
import torch
from made_traces import make_step
from tiny_models import Returns
from torch import nn

import nandoctor
from nandoctor.autocast.policy import Policy
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.changes.places import site_of
from nandoctor.changes.setting import UseFormat
from nandoctor.engine.runner import CLOSELY
from nandoctor.evidence.edits import OpSite, SingleEdit
from nandoctor.evidence.formats import BF16
from nandoctor.fixes.agreement import BF16_TOLERANCE, TOLERANCE
from nandoctor.fixes.meaning import Meaning
from nandoctor.fixes.proof import Verifier
from nandoctor.fixes.verify import TrialBudget, Trials
from nandoctor.fixes.writing import WrittenChange


def make_trials(step, *, numerics=False):
    return Trials(step, TrialBudget(), numerics=numerics)


def first_site(step, op):
    return site_of(next(made for made in step.run(watch=CLOSELY).trace.ops if made.op == op))


def test_nothing_is_run_twice():
    step = make_residual(empty_row=True)
    trials, unchanged, kept = make_trials(step), UseFormat(format=step.low), KeepModule(module="", children=False)
    first = trials.look(unchanged), trials.judge(kept).passes
    runs = trials.budget.num_run
    assert (trials.look(unchanged), trials.judge(kept).passes, trials.budget.num_run) == (*first, runs)


@pytest.mark.slow
def test_a_spent_budget_is_told():
    report = nandoctor.replay("sample_dumps/residual_stream.pth", max_trials=5).report
    assert any("budget" in note for note in report.search_notes)
    unspent = nandoctor.replay("sample_dumps/residual_stream.pth", max_trials=0).report
    assert not any("No change was found" in note for note in unspent.search_notes)  # nobody looked
    assert nandoctor.replay("sample_dumps/residual_stream.pth", fixes=False).report.fixes == ()


class Noisy(nn.Linear):
    """Divides fp32's own rounding noise by a tiny eps: fp32 is no truth there, float64 is."""

    def forward(self, x):
        h = super().forward(x)
        spread = h.std(dim=0, keepdim=True)
        return (h - h.mean(dim=0, keepdim=True)) / (spread + 1e-8)


def test_what_fp32_itself_is_unsure_of_need_not_agree():
    step = make_step(Noisy(2, 4, bias=False), torch.full((3, 2), 0.3))
    trials = make_trials(step)
    assert not trials.judge().outcome.finite
    edit = SetArgument(site=first_site(step, "add"), argument="other", was=1e-8, value=1e-4)
    assert trials.judge(edit).passes


def test_numerics_is_judged_against_fp32_with_the_same_change():
    step = make_step(Returns(torch.log), torch.tensor([[0.0, 1.0, 1e-3]]))
    site = first_site(step, "log")
    trials = make_trials(step, numerics=True)
    assert trials.judge(ClampArgument(site=site, argument="self", low=1e-6)).passes
    blunt = trials.judge(ClampArgument(site=site, argument="self", low=0.5))  # changes the log of 1e-3, which was fine
    assert blunt.outcome.finite
    assert not blunt.passes
    assert not trials.judge(KeepModule(module="")).passes
    assert not trials.judge(UseFormat(format=BF16)).passes
    assert math.isfinite(blunt.outcome.max_rel_err)


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
    trials, site = make_trials(step, numerics=True), first_site(step, "div")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached(SingleEdit):
    site: OpSite

    def run(self, op):
        return op.run(**{"self": op.argument("self").detach()})


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep, self.wide = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        return torch.sqrt(self.deep(x).square()) + self.wide(x)


def test_a_change_with_which_a_weight_learns_nothing_is_no_fix():
    step = make_step(TwoWays(), {"x": torch.zeros(2, 4)}, loss=lambda output, _: output.mean())
    trials = make_trials(step, numerics=True)
    verifier = Verifier(trials, guilty=(), random=False, trusts_fp32=False, meaning=Meaning(trials=trials))
    change = Detached(site=first_site(step, "sqrt"))
    judged, checks = verifier.verify(WrittenChange(kind="advice", title="", text=""), change)
    assert not judged.passes
    assert checks[-1].text == "`deep.weight` gets no gradient any more"
