"""One run: what it may meet, and that everything it touched is as it was."""

from contextlib import suppress

import pytest
import torch
from made_traces import make_step
from tiny_models import Chain, Counts, Drops, Raises, Returns
from torch import nn
from torch.utils.checkpoint import checkpoint

from nandoctor.autocast.policy import REFERENCE, Policy
from nandoctor.engine.progress import Listener
from nandoctor.engine.runner import Watch
from nandoctor.errors import ModelError
from nandoctor.evidence.formats import BF16, FP16

CUDA = Policy(name="cuda", format=FP16)
IMAGE = torch.ones(2, 4)


def step_of(model, **batch):
    """The step that calls `model` with the one array of the batch, an image unless given."""
    return make_step(model, batch or {"image": IMAGE})


def run_once(model, *, policy=REFERENCE, training=False, seed=0, **batch):
    return step_of(model, **batch).varied(training=training, seed=seed).run(policy)


def failing(model):
    """A chain that fails with finite values after `model`."""
    return Chain(part=model, end=Raises())


@pytest.mark.parametrize(("training", "drawn"), [(True, True), (False, False)])
def test_a_run_knows_whether_random_numbers_were_drawn(training, drawn):
    assert run_once(Drops(4), training=training).random is drawn


def partly_frozen():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), Counts())
    model[0].eval()
    return model


@pytest.mark.parametrize("wrap", [lambda model: model, failing], ids=["returns", "raises"])
@pytest.mark.parametrize("training", [True, False])
def test_train_flags_are_restored(wrap, training):
    model = wrap(partly_frozen())
    before = [module.training for module in model.modules()]
    with suppress(ModelError):
        run_once(model, training=training, image=torch.rand(3, 4))
    assert [module.training for module in model.modules()] == before
    assert len(set(before)) == 2


def test_a_batch_that_is_written_to_is_whole_in_the_next_run():
    model = Returns(lambda x: x.mul_(2))
    step = step_of(model, image=torch.ones(2))
    for _ in range(2):
        assert step.run(REFERENCE).output.tolist() == [2.0, 2.0]
    assert step.call.batch["image"].tolist() == [1.0, 1.0]


def test_weights_of_a_reentrant_checkpoint_have_gradients():
    """It computes again with the weights that autocast has cast before, up to torch 2.9 without a graph."""
    model = Chain(first=nn.Linear(4, 4), last=Returns(lambda x: checkpoint(model.last.inner, x, use_reentrant=True)))
    model.last.inner = nn.Linear(4, 4)
    step = make_step(model, IMAGE, loss=lambda output, _: output.float().sum())
    made = step.run(Policy(name="native", format=BF16), Watch(backward=True, keep=True)).gradients
    assert made.keys() == dict(model.named_parameters()).keys()


def test_a_forward_that_raises_on_finite_values_is_miscalled():
    with pytest.raises(ModelError, match=r"raised ValueError at .*tiny_models\.py:\d+: refused") as caught:
        run_once(failing(nn.Identity()))
    assert "--inputs" in caught.value.remedy
    assert isinstance(caught.value.__cause__, ValueError)


def test_progress_is_told_after_every_call():
    counts = []
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    progress = Listener(lambda _, done, __: counts.append(done))
    make_step(model, IMAGE, training=False, progress=progress).run(REFERENCE)
    assert counts == [0, 1, 2, 3]  # the first tells that the run begins
