"""When a run is stopped and when it is left alone: GradScaler's own skips are no reason."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nandoctor import NonFiniteTrainingError, Recorder, cuda_autocast
from nandoctor.capture.step import RecordedStep
from nandoctor.capture.step_policy import StepPolicy
from nandoctor.capture.tensors import Flag
from nandoctor.dumps.reader import read_dump

each_optimizer = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


def feed(folder, pattern, **rule):
    policy = make_policy(folder, keep=99, **rule)
    for step, letter in enumerate(pattern):
        policy.decide(
            RecordedStep(step=step, before=True, flags=[Flag(float("inf") if letter == "F" else 1.0)]), may_stop=True
        )
    return policy


@pytest.mark.parametrize(
    ("pattern", "stops"),
    [
        ("." * 30, False),
        ("FF" + "." * 8, False),
        ("FFF", True),
        ("FF" + "." * 7 + "F", True),
        ("FF" + "." * 8 + "F", False),
        ("F.........." * 5, False),
    ],
)
def test_the_share_in_the_window_decides(tmp_path, pattern, stops):
    with pytest.raises(NonFiniteTrainingError) if stops else nullcontext():
        feed(tmp_path, pattern, threshold=0.2, window=10)


def test_an_episode_begins_once(tmp_path):
    written = feed(tmp_path, ".FF...F....F", threshold=1.0, window=4).written
    assert [path.stem for path in written] == ["nan-step000001", "nan-step000006", "nan-step000011"]


@pytest.mark.parametrize(
    ("scales", "unexpected"),
    [
        ("8- 4- 2 2 2", []),  # the warm-up
        ("8- 4 4 4- 2 2", [3]),
        ("4 4 8- 4 4 8- 4", []),  # just grown to 8
        ("4 4 8 8- 4 4", [3]),  # one step fits, and a later one does not
        ("4 4 8 8 16- 8 8- 4", [6]),
        ("4 4 8 16 16- 8- 4- 2", [4]),  # one episode
    ],
)
def test_which_skips_the_scaler_makes_to_find_its_scale(tmp_path, caplog, scales, unexpected):
    policy = make_policy(tmp_path, keep=9)
    for index, text in enumerate(scales.split()):
        step = RecordedStep(step=index, scale=Flag(float(text.rstrip("-"))), skipped=text.endswith("-"))
        step.updates.append(SimpleNamespace(gradients=None, weights=None))
        policy.decide(step, may_stop=True)
    assert [record.args[0] for record in caplog.records] == unexpected


def test_files_of_skipped_steps_make_way_first(tmp_path):
    policy = make_policy(tmp_path, keep=3)
    for index, reason in enumerate(["loss", "skipped", "gradients", "skipped", "skipped"]):
        policy.save(RecordedStep(step=index, before=True), reason)
    assert [path.stem[-1] for path in policy.written] == ["0", "2", "4"]


def make_policy(folder, keep, threshold=0.1, window=100):
    contents = {"event": {}, "model": {"file": "net.py"}}
    settings = SimpleNamespace(threshold=threshold, window=window, folder=folder, keep=keep, on_save=None)
    return StepPolicy(settings=settings, make_contents=lambda *_: contents)


@each_optimizer
def test_the_first_skip_after_the_warm_up_is_saved(tmp_path, fused):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=512.0)
    with Recorder(model, folder=tmp_path, scaler=scaler, threshold=0) as recorder:
        weights = train(recorder, model, scaler, 200.0, 1.0, 1.0, 1e20, 1.0, fused=fused)
    (path,) = recorder.written
    dump = read_dump(path)
    assert (path.name, dump.scalars["reason"], dump.scalars["scaler.scale"]) == ("nan-step000003.pth", "skipped", 256.0)
    assert torch.equal(dump.state["weight"], weights[3])


def train(recorder, model, scaler, *steepness, fused):
    """Finite losses with gradients of given sizes: a step is skipped where scale times gradient passes 65504.

    Returns the weights before each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    weights = []
    for size in steepness:
        weights.append(model.weight.detach().clone())
        with recorder.step():
            with cuda_autocast():
                loss = size * model(torch.ones(1, 4)).float().sum()
            recorder.watch(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return weights


@each_optimizer
def test_gradients_that_no_scale_fixes_stop_the_run(tmp_path, fused):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    recorder = Recorder(model, folder=tmp_path, scaler=scaler, window=10, threshold=0.3)
    with pytest.raises(NonFiniteTrainingError, match="scaler skipped the step; 4 of the last 7 steps failed"):
        train(recorder, model, scaler, *[1e20] * 40, fused=fused)
    first, last = recorder.written
    dump = read_dump(first)
    assert dump.scalars["reason"] == "skipped"
    assert dump.scalars["scaler.scale"] == 0.5  # steps that are skipped at scales 4, 2 and 1 do not count
    assert torch.equal(dump.state["weight"], model.weight)
    assert read_dump(last).scalars["event"] == "stopped"
