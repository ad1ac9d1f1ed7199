"""A trial ends early only where what is left of it can be nothing but NaN."""

import pytest
import torch
from torch import nn

from nandoctor.dumps.reader import read_dump
from nandoctor.evidence.edits import KeepModule, KeepSamples, Together, UseFormat
from nandoctor.evidence.formats import BF16
from nandoctor.fixes.budget import TrialBudget, TrialEnded, ending_where_lost, find_lost_call
from nandoctor.fixes.search import search_fixes
from nandoctor.fixes.verify import Trials
from nandoctor.pipeline import replay_dump
from nandoctor.replaying.settings import Settings


class Loud(nn.Module):
    """A layer that passes 65504, what it is brought back to size by, and a layer after it, [n, 4] -> same."""

    def __init__(self, shown="all"):
        super().__init__()
        self.loud, self.last, self.beside = (nn.Linear(4, 4) for _ in range(3))
        self.calm = nn.LayerNorm(4)
        self.shown = shown
        with torch.no_grad():
            self.loud.weight.copy_(torch.linspace(3e4, 6e4, 4)[:, None].expand(4, 4))

    def forward(self, x):
        made = self.calm(self.loud(x))
        if self.shown == "selected":
            made = torch.where(x > 0, made, self.beside(x))
        if self.shown == "largest":
            made = torch.fmax(made, made * 2)
        return self.last(made)


def find(model, x, folder):
    torch.save({"state_dict": model.state_dict(), "x": x, "logit": torch.full_like(x, torch.nan)}, folder / "dump.pth")
    return replay_dump(read_dump(folder / "dump.pth"), model, Settings())


@pytest.fixture
def x():
    return torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5


def test_the_first_call_that_leaves_nothing_is_found(tmp_path, x):
    assert find_lost_call(find(Loud(), x, tmp_path).findings) == ("calm", 0)


@pytest.mark.parametrize("shown", ["selected", "largest"])
def test_what_a_selection_follows_is_not_lost(shown, tmp_path, x):
    found = find_lost_call(find(Loud(shown), x, tmp_path).findings)
    assert found is None or found[0] == "last"


def test_one_sound_sample_is_not_lost(tmp_path, x):
    x[1] = 0.0
    assert find_lost_call(find(Loud(), x, tmp_path).findings) is None


def test_a_second_origin_leaves_it_open(tmp_path, x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Loud(), Loud()

        def forward(self, x):
            return self.one(x) + self.other(x)

    assert find_lost_call(find(Twice(), x, tmp_path).findings) is None


def test_another_mode_may_leave_out_what_was_lost(tmp_path, x):
    class Skipped(Loud):
        def forward(self, x):
            made = self.calm(self.loud(x))
            return self.last(made if self.training else x)

    found = find(Skipped(), x, tmp_path)
    assert found.step.training
    lost_at = find_lost_call(found.findings)
    assert lost_at == ("calm", 0)
    trials = Trials(found.step, TrialBudget(), numerics=False, lost_at=lost_at)
    assert trials.varied(training=False, seed=found.step.seed).look().finite


def test_a_trial_ends_where_all_is_lost_and_only_there(tmp_path, x):
    found = find(Loud(), x, tmp_path)
    reached = []
    found.step.model.last.register_forward_hook(lambda *_: reached.append("last"))
    trials = Trials(found.step, TrialBudget(), numerics=False, lost_at=find_lost_call(found.findings))
    whole = Trials(found.step, TrialBudget(), numerics=False)
    assert not trials.reference().has_nan
    assert reached
    reached.clear()
    failing = KeepModule(module="last")
    assert not trials.passes(failing)
    assert not trials.varied(training=False, seed=0).look().finite
    assert not trials.look(UseFormat(format=BF16)) or reached  # bf16 holds the values: it runs to the end
    reached.clear()
    assert trials.judge(failing) == whole.judge(failing)
    reached.clear()
    assert not trials.run(KeepSamples(samples=(0,))).values_finite
    assert trials.run().values["output."].shape == x.shape  # asked for its values, so it is run to the end
    assert len(reached) == 2
    helping = Together(edits=(KeepModule(module="loud"), KeepModule(module="calm")))
    assert trials.judge(helping) == whole.judge(helping)
    assert trials.passes(helping)


def test_the_same_is_verified_with_and_without_it(tmp_path, x, monkeypatch):
    found = find(Loud(), x, tmp_path)
    early = search_fixes(found.step, found.findings, TrialBudget())
    monkeypatch.setattr("nandoctor.fixes.search.find_lost_call", lambda _: None)
    whole = search_fixes(found.step, found.findings, TrialBudget())
    assert early == whole
    assert early.fixes[0].verified


def test_code_that_catches_errors_does_not_go_on():
    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            try:
                return self.inner(x)
            except Exception:
                return torch.zeros(2)

    model, nan = Catching(), torch.full((2,), torch.nan)
    with ending_where_lost(model, ("inner", 1)):
        assert model(nan).isnan().all()  # the call before
        with pytest.raises(TrialEnded):
            model(nan)
    with ending_where_lost(model, ("inner", 0)):
        assert model(torch.tensor([torch.nan, 1.0]))[1] == 1
    assert not model.inner._forward_hooks
