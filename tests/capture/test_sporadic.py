"""Failures that come and go: each episode is saved, evaluations are told apart, micro-batches stand beside steps."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from trainings import loss_of, make_batch, make_model

import nandoctor
from nandoctor import Recorder
from nandoctor.dumps.reader import read_dump


def test_a_failure_at_every_other_step_does_not_write_on(tmp_path):
    model = nn.Linear(4, 1)
    with Recorder(model, folder=tmp_path, keep=2, threshold=1.0) as recorder:
        for number in range(90):
            recorder.watch(model(torch.full((1, 4), float("nan") if number % 2 else 1.0)).sum())
            recorder.end()
    assert [path.name for path in recorder.written] == ["nan-step000001.pth", "nan-step000003.pth"]


def test_watch_in_an_evaluation_blames_no_step(tmp_path, caplog):
    model = make_model()
    with Recorder(model, folder=tmp_path) as recorder:
        batch = make_batch()
        recorder.watch(loss_of(model(batch[0]), batch), batch)
        model.eval()
        with torch.no_grad(), caplog.at_level(logging.WARNING):
            for _ in range(2):
                recorder.watch(loss_of(model(batch[0] * float("nan")), batch))
    assert recorder.written == ()
    assert recorder.history.num_bad_losses == 0
    assert [message for message in caplog.messages if "eval mode" in message] == [
        "nandoctor.Recorder: watch was called after a forward in eval mode, which is not a training step, so "
        "nothing was checked. To record an evaluation, put each of its steps into `with recorder.step(batch):`."
    ]


def test_an_explicit_evaluation_is_recorded_and_replayed(tmp_path):
    model = make_model().eval()
    with Recorder(model, folder=tmp_path) as recorder, torch.no_grad():
        for loud in (False, True):
            batch = make_batch(loud)
            with recorder.step(batch), nandoctor.cuda_autocast():
                recorder.watch(loss_of(model(batch[0]), batch))
    (path,) = recorder.written
    report = nandoctor.replay(path, fixes=False).report
    assert (path.name, report.reproduction.grade) == ("nan-step000001.pth", "exact")
    assert report.first_nonfinite.place.module == "middle"


def test_an_evaluation_within_a_step_is_no_call_of_it(tmp_path):
    model = make_model()
    with Recorder(model, folder=tmp_path) as recorder:
        batch = make_batch(loud=True)
        with recorder.step(batch):
            with nandoctor.cuda_autocast():
                loss = loss_of(model(batch[0]), batch)
            with torch.no_grad():
                model(batch[0])
            recorder.watch(loss)
    assert len(read_dump(recorder.written[0]).recorded.calls) == 1


@pytest.mark.parametrize(("is_marked", "kept"), [(True, 25), (False, 9)])
def test_a_step_of_many_calls(tmp_path, is_marked, kept):
    """A text that is read letter by letter, an episode of a policy: the state of the first call is NaN in all later."""
    model = nn.RNNCell(3, 2)
    with Recorder(model, folder=tmp_path) as recorder, recorder.step() if is_marked else nullcontext():
        state = torch.full((1, 2), float("nan"))
        for _ in range(25):
            state = model(torch.ones(1, 3), state)
        recorder.watch(state.sum())
    dump = read_dump(recorder.written[0])
    assert len(dump.recorded.calls) == kept
    assert ("16 forwards" in str(dump.missing)) == (not is_marked)
