"""One run: what it may meet, what it draws, also in a forked process, and that everything it touched is as it was."""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_traces import make_step
from tiny_models import Chain, Counts, Drops, Raises, Returns
from torch import nn
from torch.utils.checkpoint import checkpoint

from nandoctor.autocast.policy import EXACT, REFERENCE, Policy, apply_policy
from nandoctor.engine import module_state
from nandoctor.engine.call import Call
from nandoctor.engine.module_state import draw_in_fp32, is_spoilt, nonfinite_kinds
from nandoctor.engine.progress import Listener
from nandoctor.engine.runner import Watch
from nandoctor.errors import ModelError
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.process_wide import switched
from nandoctor.tracing.dispatch_hook import intercepting

CUDA = Policy(name="cuda", format=FP16)
IMAGE = torch.ones(2, 4)


def step_of(model, **batch):
    """The step that calls `model` with the one array of the batch, an image unless given."""
    return make_step(model, batch or {"image": IMAGE})


def run_once(model, *, policy=REFERENCE, training=False, seed=0, **batch):
    return step_of(model, **batch).varied(training=training, seed=seed).run(policy)


def failing(model):
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


@pytest.mark.parametrize("limit", [10, 60, 1 << 28])
def test_kept_gradients_are_those_of_the_loss_itself(limit, monkeypatch):
    """Also those of weights that only fp32 makes large."""
    monkeypatch.setattr(module_state, "LARGE_NBYTES", limit)
    step = make_step(nn.Linear(4, 4).half(), IMAGE.half(), loss=lambda output, _: output.float().sum())
    scaled = replace(step, mode=replace(step.mode, loss_scale=8.0))
    made = scaled.run(REFERENCE, Watch(backward=True, keep=True))
    assert made.gradients["bias"].tolist() == [2.0] * 4


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


ROOT = Path(__file__).parents[2]

AFTER = """
import os, nandoctor
def replay():
    return nandoctor.replay("sample_dumps/unet_blank_tile.pth", max_trials=3)
first = replay()
child = os.fork()
if child == 0:
    second = replay()
    same = first.report.headline == second.report.headline
    os._exit(0 if same and second.report.reproduction.grade in ("exact", "same-mask") else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.slow
def test_a_forked_process_replays():
    """With two threads: to wait for the parent's in a child hangs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", AFTER], cwd=ROOT, env=environment, timeout=300, check=False)
    assert done.returncode == 0


CPU = torch.device("cpu")
DRAWS = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "rand": lambda x: torch.rand(*x.shape, dtype=x.dtype),
    "normal": lambda x: torch.normal(x, 1 + 0 * x),
    "normal_": lambda x: torch.empty_like(x).normal_(0.5, 2.0),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(0.5 + 0 * x),
    "distribution": lambda x: torch.distributions.Normal(0 * x, 1 + 0 * x).rsample(),
    "gumbel": torch.nn.functional.gumbel_softmax,
    "dropout": lambda x: torch.nn.functional.dropout(1 + 0 * x),
    "randint": lambda x: torch.randint(9, x.shape),
}


@pytest.mark.parametrize("name", DRAWS)
def test_float64_draws_what_fp32_does(name):
    made = []
    for policy, dtype in ((REFERENCE, torch.float32), (EXACT, torch.float64)):
        torch.manual_seed(0)
        with apply_policy(policy, CPU), intercepting(draw_in_fp32):
            made.append((DRAWS[name](torch.zeros(4, 16, dtype=dtype)), torch.rand(1, dtype=torch.float32)))
    (narrow, after), (wide, after_wide) = made
    assert wide.dtype in (torch.float64, torch.int64)
    torch.testing.assert_close(wide, narrow.to(wide.dtype), rtol=1e-6, atol=1e-6)
    assert torch.equal(after, after_wide)  # and what is drawn next as well


def test_a_step_that_draws_float64_does_so_in_fp64_too():
    step = replace(step_of(nn.Dropout(0.5)), call=Call(batch={}, used=frozenset(), forward=lambda _: torch.rand(4)))
    with switched({"default_dtype": torch.float64}):
        assert torch.equal(step.run().output, step.run(EXACT).output)


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.large = nn.Linear(256, 256)
        self.own = nn.Parameter(torch.zeros(1 << 15))
        self.register_buffer("peak", torch.zeros(2))


def _write(tensor):
    with torch.no_grad():
        tensor.view(-1)[0] = torch.inf


WRITES = {
    "peak": lambda model: _write(model.peak),
    "state": lambda model: setattr(model, "state", torch.tensor(torch.nan)),
    "large.seen[1]": lambda model: setattr(model.large, "seen", [torch.ones(2), torch.tensor(torch.inf)]),
    "past.key": lambda model: setattr(model, "past", {"key": torch.tensor(torch.inf)}),
    "own": lambda model: _write(model.own.data),
    "large.bias": lambda model: _write(model.large.bias.data),
    "large.weight": lambda model: _write(model.large.weight),
}


@pytest.mark.parametrize("name", WRITES)
def test_all_state_is_looked_at(name):
    model = Keeping()
    assert nonfinite_kinds(model) == {}
    WRITES[name](model)
    assert {place: is_spoilt(kinds) for place, kinds in nonfinite_kinds(model).items()} == {name: True}
