"""When a run is stopped and when it is left alone: GradScaler's own skips are no reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor import NonFiniteTrainingError, Recorder, cuda_autocast
from nandoctor.capture.async_flags import Flag
from nandoctor.capture.step_policy import StepHistory, StepResult, StopRule
from nandoctor.dumps.reader import read_dump

each_optimizer = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


def feed(rule, pattern):
    """The history after steps told by letters: "." good, "L" bad loss, "S" skipped at scale 1/2, "s" at 1024."""
    history = StepHistory(rule)
    for step, letter in enumerate(pattern):
        scale = {"S": 0.5, "s": 1024.0}.get(letter)
        history.add(StepResult(step=step, loss_nonfinite=letter == "L", skipped=scale is not None, loss_scale=scale))
    return history


@pytest.mark.parametrize(
    ("pattern", "stops"),
    [
        ("." * 30, False),
        ("ss" + "." * 8, False),
        ("s" * 20, False),
        ("LL" + "." * 8, False),
        ("LLL" + "." * 7, True),
        ("LLL", True),
        ("LLL" + "." * 8, False),
        ("LLSS", False),
        ("SSS", True),
        ("L.........." * 5, False),
    ],
)
def test_the_share_in_the_window_decides(pattern, stops):
    assert (feed(StopRule(threshold=0.2, window=10), pattern).why_stop() is not None) is stops


def test_so_many_in_a_row():
    rule = StopRule(threshold=1.0, in_a_row=3)
    assert feed(rule, "LL.LL").why_stop() is None
    assert feed(rule, "LLSL.LLL").why_stop() == "3 non-finite steps in a row"
    assert feed(StopRule(in_a_row=1), "..L").why_stop() == "1 non-finite step"


def test_an_episode_begins_once():
    rule = StopRule(threshold=1.0, window=4)
    begun = [feed(rule, ".LL...L....L"[:end]).begins_episode for end in range(1, 13)]
    assert [step for step, begins in enumerate(begun) if begins] == [1, 6, 11]


def test_the_counts_are_those_of_the_whole_run():
    plain = feed(StopRule(threshold=1.0, window=4), "sL.s....S").to_plain()
    assert (plain["num_steps"], plain["num_bad_losses"], plain["num_skipped"]) == (9, 1, 3)
    assert (plain["recent_bad_losses"], plain["recent_skipped"]) == ([], [8])


def train(recorder, model, scaler, *steepness, fused):
    """Finite losses with gradients of given sizes: a step is skipped where scale times gradient passes 65504."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    for size in steepness:
        with recorder.step():
            with cuda_autocast():
                loss = size * model(torch.ones(1, 4)).float().sum()
            recorder.watch(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@each_optimizer
def test_the_warm_up_of_the_loss_scale_is_left_alone(tmp_path, fused):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu")
    with Recorder(model, folder=tmp_path, scaler=scaler, window=10) as recorder:
        train(recorder, model, scaler, *[50.0] * 20, fused=fused)
    assert recorder.history.num_skipped == 6  # 50 * 65536 / 2 ** 6 fits
    assert recorder.history.num_bad_losses == 0
    assert recorder.written == ()
    assert list(tmp_path.iterdir()) == []


@each_optimizer
def test_gradients_that_no_scale_cures_stop_the_run(tmp_path, fused):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    recorder = Recorder(model, folder=tmp_path, scaler=scaler, window=10, threshold=0.3)
    with pytest.raises(NonFiniteTrainingError, match="skipped 4 of the last 7 steps at a loss scale below 1"):
        train(recorder, model, scaler, *[1e20] * 40, fused=fused)
    first, last = recorder.written
    dump = read_dump(first)
    assert dump.scalars["reason"] == "skipped"
    assert dump.scalars["scaler.scale"] == 0.5  # 4, 2 and 1 are the scaler's own affair
    assert torch.equal(dump.state["weight"], model.weight)
    assert read_dump(last).scalars["event"] == "stopped"


def test_a_run_beyond_the_threshold_is_stopped(tmp_path):
    model = nn.Linear(4, 1)
    recorder = Recorder(model, folder=tmp_path, window=10, threshold=0.2)

    def run():
        for number in range(10):
            recorder.watch(model(torch.full((1, 4), float("nan") if number in (2, 3, 5) else 1.0)).sum())
            recorder.end()

    with pytest.raises(NonFiniteTrainingError, match="non-finite in 3 of the last 6 steps"):
        run()
    assert len(recorder.written) == 2
    assert recorder.history.num_steps == 6


@pytest.fixture
def flags_of_a_device(monkeypatch):
    """Flags that take their time, as those of a GPU do."""
    monkeypatch.setattr(Flag, "on_device", property(lambda _: True))


@pytest.mark.usefixtures("flags_of_a_device")
def test_a_fused_optimizer_is_judged_a_step_late(tmp_path):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=0.5)
    with Recorder(model, folder=tmp_path, scaler=scaler) as recorder:
        train(recorder, model, scaler, 1.0, 1e20, 1.0, 1.0, fused=True)
    (path,) = recorder.written
    assert path.name == "nan-step000001.pth"
    assert recorder.history.num_skipped == 1
    assert read_dump(path).missing == ("the weights of the step: they are those after 1 further update",)
    assert any(
        "those after 1 further update" in note for note in nandoctor.replay(path, lambda: nn.Linear(4, 1)).report.notes
    )


@pytest.mark.usefixtures("flags_of_a_device")
def test_a_bad_loss_is_judged_before_the_next_update(tmp_path):
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=64.0)
    with Recorder(model, folder=tmp_path, scaler=scaler) as recorder:
        train(recorder, model, scaler, 1.0, float("inf"), 1.0, fused=True)
    (path,) = recorder.written
    assert (path.name, read_dump(path).missing) == ("nan-step000001.pth", ())
