"""One run: what it records, that it can be repeated, and that everything it touched is as it was."""

import random
from contextlib import suppress

import numpy as np
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
from nandoctor.evidence.formats import BF16, FP16, FP32

CUDA = Policy(name="cuda", format=FP16)
POLICIES = [REFERENCE, CUDA, Policy(name="native", format=FP16)]
IMAGE = torch.ones(2, 4)


def step_of(model, **batch):
    """The step that calls `model` with the one array of the batch, an image unless given."""
    return make_step(model, batch or {"image": IMAGE})


def run_once(model, *, policy=REFERENCE, training=False, seed=0, **batch):
    return step_of(model, **batch).varied(training=training, seed=seed).run(policy)


def failing(model):
    """A chain that fails with finite values after `model`."""
    return Chain(part=model, end=Raises())


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_run_records_what_it_ran_under(policy):
    trace = run_once(nn.Linear(4, 4), policy=policy, training=True, seed=3).trace
    assert (trace.policy, trace.format, trace.training, trace.seed) == (policy.name, policy.format, True, 3)
    assert trace.format is (FP32 if policy is REFERENCE else FP16)
    assert trace.finite
    assert [stats.path for stats in trace.batch] == ["image"]
    assert trace.output[0].dtype is policy.format
    assert trace.elapsed_s > 0


def test_runs_with_dropout_are_repeatable_and_seeds_differ():
    model = Drops(4)
    first, again, other = (run_once(model, training=True, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.output, again.output)
    assert not torch.equal(first.output, other.output)


def numpy_noise(x):
    return x + float(np.random.rand()) + random.random()


@pytest.mark.parametrize(("training", "drawn"), [(True, True), (False, False)])
def test_a_run_knows_whether_random_numbers_were_drawn(training, drawn):
    assert run_once(Drops(4), training=training).random is drawn


def random_states():
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()


@pytest.mark.parametrize("model", [Drops(4), Returns(numpy_noise), failing(Drops(4))], ids=["torch", "numpy", "raises"])
def test_random_states_are_restored(model):
    torch.rand(3), np.random.rand(3), random.random()
    torch_state, numpy_state, python_state = random_states()
    with suppress(ModelError):
        run_once(model, training=True)
    now = random_states()
    assert torch.equal(now[0], torch_state)
    assert np.array_equal(now[1], numpy_state)
    assert now[2] == python_state


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


def test_a_forward_that_needs_a_graph_runs_once_more():
    model = nn.Linear(4, 1)
    seen = []

    def forward(arrays):
        output = model(arrays["image"])
        seen.append(torch.rand(()))
        return torch.autograd.grad(output.sum(), model.weight)[0]

    outcome = make_step(model, {"image": IMAGE}, training=False, forward=forward).run(REFERENCE)
    assert outcome.output.tolist() == [[2.0, 2.0, 2.0, 2.0]]
    assert [call.key for call in outcome.trace.calls] == [("", 0)]
    assert seen[0] == seen[1]


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


def poisoned_norm():
    model = Chain(norm=nn.BatchNorm1d(4), head=nn.Linear(4, 4))
    model.norm.running_var[1] = float("nan")
    return model


@pytest.mark.parametrize(("training", "names"), [(True, []), (False, ["running_var"])])
def test_bad_buffers_are_state_where_the_run_reads_them(training, names):
    trace = run_once(poisoned_norm(), training=training, image=torch.rand(3, 4)).trace
    norm = next(call for call in trace.calls if call.module == "norm")
    assert [stats.path for stats in norm.state] == names
    assert trace.finite is training


def test_progress_is_told_after_every_call():
    counts = []
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    progress = Listener(lambda _, done, __: counts.append(done))
    make_step(model, IMAGE, training=False, progress=progress).run(REFERENCE)
    assert counts == [0, 1, 2, 3]  # the first tells that the run begins
