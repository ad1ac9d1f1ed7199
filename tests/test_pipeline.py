"""Whole replays of tiny models: verdict, first non-finite layer, grade, and how the failing setting is found."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_models import Chain, Drops, Overflowing, Returns
from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.errors import DumpError, ModelError
from nandoctor.pipeline import add_fixes, replay_dump
from nandoctor.step.settings import Settings

NAN = float("nan")
IMAGE = torch.ones(4, 4)
NONFINITE = torch.full((4, 4), NAN)


def dump_of(model, *, layout="plain", scalars=None, **arrays):
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    arrays = {name: array.clone() for name, array in arrays.items()}
    return Dump(path=Path("dump.pth"), nbytes=1, layout=layout, state=state, arrays=arrays, scalars=scalars or {})


def replay(model, settings=None, *, fixes=False, **arrays):
    """The report on a dump of this model with these arrays, an image of ones unless given."""
    arrays = arrays or {"image": IMAGE, "logit": NONFINITE}
    settings = dataclasses.replace(settings or Settings(), model=model, fixes=fixes)
    return add_fixes(replay_dump(dump_of(model, **arrays), settings), settings)


def test_a_nan_that_does_not_come_back_says_what_may_be_missing():
    report = replay(nn.Linear(4, 4))
    assert (report.verdict, report.reproduction.grade) == ("not-reproduced", "finite")
    assert "--mode" in report.next_steps[0]
    assert report.first_nonfinite is None


def test_poisoned_buffers_are_not_blamed_in_train_mode():
    model = Chain(norm=nn.BatchNorm1d(4), shift=Returns(lambda x: x + 10), net=Overflowing())
    model.norm.running_var.fill_(NAN)
    report = replay(model, image=torch.rand(4, 4), logit=NONFINITE)
    assert (report.verdict, report.first_nonfinite.place.module) == ("precision", "net.scale")
    assert report.runs.autocast.training is True


class LogOfDropout(Drops):
    """NaN exactly where dropout left something, which depends on the seed."""

    def forward(self, image):
        return torch.where(self.dropout(image) > 0, NAN, self.head(image))


def test_a_few_seeds_are_tried_where_the_model_is_random():
    model, image = LogOfDropout(), torch.ones(4, 64)
    torch.manual_seed(2)
    with torch.no_grad():
        logit = model(image)
    report = replay(model, image=image, logit=logit)
    *_, last = report.reproduction.attempts
    assert (last.training, last.seed, last.grade) == (True, 2, "exact")
    assert report.reproduction.grade == "exact"
    assert len(report.reproduction.attempts) == 4


@pytest.mark.parametrize(
    ("saved", "versions", "said"),
    [
        ((), {"torch": "2.4.1"}, "is not in the file:"),
        ((torch.get_rng_state(),), {}, "in the file does not give those of the training:"),
        ((torch.get_rng_state(),), {"torch": "2.4.1"}, "not give those of the training, which ran on torch 2.4.1:"),
    ],
)
def test_other_random_numbers_are_told(saved, versions, said):
    model, image = Drops(4), torch.ones(2, 4)
    image[0] = NAN
    logit = torch.full((2, 4), 100.0)
    logit[0] = NAN
    dump = dump_of(model, image=image, logit=logit)
    dump = dataclasses.replace(dump, rng_states=saved, recorded=Recorded(versions=versions))
    report = replay_dump(dump, Settings(model=model, mode="train", seed=1, fixes=False)).report
    assert report.reproduction.grade == "same-mask"
    assert any(said in note for note in report.notes)
    versions_noted = f"Recorded with torch 2.4.1 and replayed with {torch.__version__}."
    assert any(versions_noted in note for note in report.notes) == bool(versions)
    assert report.environment.recorded_torch == versions.get("torch")


class Untraceable(nn.Module):
    """Makes a parameter by a function of torch's that was looked up before the replay, and decides by a hidden NaN."""

    make = torch.Tensor._make_subclass

    def forward(self, x):
        hidden = x.sum() * torch.inf
        weight = self.make(nn.Parameter, torch.zeros(3) + 0, True)
        return x + weight + (1 if hidden - hidden > 0 else 0)


def test_a_finite_step_that_nobody_could_watch_is_no_all_clear():
    report = replay(Untraceable(), x=torch.ones(4, 3))
    assert report.verdict == "cannot-tell"
    assert "could not be traced" in report.headline


class LogOfSum(nn.Module):
    def forward(self, x):
        return x.sum(1).log()


POSITIVE = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) + 1


@pytest.mark.parametrize(
    ("saved", "other", "decides"),
    [
        (POSITIVE.sum(1).log(), POSITIVE + 1, True),
        (POSITIVE.sum(1).log(), torch.ones(4), True),  # the model cannot be called with it
        (POSITIVE.sum(1).log(), POSITIVE.clone(), False),  # both agree
        (torch.zeros(4), POSITIVE + 1, False),  # neither does
        (None, POSITIVE + 1, False),
        (None, torch.ones(4), True),
    ],
)
def test_the_saved_output_decides_which_array_goes_in(saved, other, decides):
    arrays = {"foo": other, "bar": POSITIVE} | ({"logit": saved} if saved is not None else {})
    if decides:
        assert "model(x=bar)" in replay(LogOfSum(), **arrays).notes[0]
    else:
        with pytest.raises(ModelError, match="not clear how to call LogOfSum"):
            replay(LogOfSum(), **arrays)


def test_buffers_alone_are_told_from_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_var.fill_(float("inf"))
    report = replay_dump(dump_of(model, layout="weights-only"), Settings()).report
    assert (report.origin.place.module, report.cause.code) == ("1", "poisoned-buffers")


def test_sound_weights_alone_are_nothing_to_replay():
    with pytest.raises(DumpError, match="nothing to replay") as caught:
        replay_dump(dump_of(nn.Linear(2, 2), layout="weights-only"), Settings())
    assert "--call" in caught.value.remedy


def test_weights_alone_are_replayed_by_a_call_with_its_own_batch():
    model = Overflowing()
    settings = Settings(model=model, call=lambda model, batch: model(IMAGE))
    assert replay_dump(dump_of(model, layout="weights-only"), settings).report.verdict == "precision"


def test_a_model_that_checks_for_nan_is_replayed_up_to_there():
    def check(x):
        if not torch.isfinite(x["logit"]).all():
            raise FloatingPointError("NaN in the output")
        return x

    report = replay(Chain(net=Overflowing(), check=Returns(check)), fixes=True)
    assert (report.verdict, report.first_nonfinite.place.module) == ("precision", "net.scale")
    assert report.runs.autocast.raised == "FloatingPointError: NaN in the output"


LOOKED_INSIDE = ["replay under autocast", "replay in fp32", "closer look under autocast"]


@pytest.mark.parametrize(
    ("make", "arrays", "stages"),
    [
        (Overflowing, {"logit": NONFINITE}, ["replay under autocast", "replay in fp32"]),
        (Overflowing, {}, LOOKED_INSIDE),
        (nn.ReLU, {"logit": IMAGE}, LOOKED_INSIDE),
        (lambda: nn.Linear(4, 4), {}, [*LOOKED_INSIDE, "backward under autocast"]),
    ],
    ids=["nonfinite", "non-finite without an output", "healthy", "trained"],
)
def test_a_dump_is_run_no_more_often_than_it_takes(make, arrays, stages):
    model, told = make(), []
    dump = dump_of(model, image=IMAGE, **arrays)
    replay_dump(dump, Settings(model=model, mode="train"), progress=lambda stage, *_: told.append(stage))
    assert list(dict.fromkeys(stage for stage in told if not stage.startswith("samples"))) == stages


def test_the_live_model_is_as_it_was():
    model = Chain(norm=nn.BatchNorm1d(4), head=nn.Linear(4, 4)).eval()
    model.norm.running_var.fill_(NAN)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replay(model, fixes=True, image=torch.rand(4, 4), logit=NONFINITE)
    assert not model.training
    assert all(torch.equal(tensor, before[name]) or name.endswith("var") for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
