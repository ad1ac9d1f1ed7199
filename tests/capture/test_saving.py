"""Files that the loop asks for: `recorder.save`, a rule for spikes of the loss, and what is called after each file."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trainings import loss_of, make_batch, make_model

from nandoctor import NanDoctorError, Recorder, replay
from nandoctor.dumps.reader import read_dump


def one_step(recorder, model, optimizer, batch):
    loss = loss_of(model(batch[0]), batch)
    recorder.watch(loss, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_a_step_saved_as_asked_replays_exactly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, folder=tmp_path, loss=loss_of, arguments={"width": 4}) as recorder:
        one_step(recorder, model, optimizer, make_batch())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        one_step(recorder, model, optimizer, make_batch())
        path = recorder.save("odd images")
        one_step(recorder, model, optimizer, make_batch())
    assert path == tmp_path / "step-step000001.pth"
    assert recorder.written == (path,)
    saved = read_dump(path)
    assert all(torch.equal(saved.state[name], value) for name, value in before.items())
    case = replay(path, model=type(model), loss=loss_of)
    assert case.report.reproduction.grade == "exact"


def test_nothing_to_save_outside_of_a_step(tmp_path):
    recorder = Recorder(nn.Linear(2, 2), folder=tmp_path)
    with pytest.raises(NanDoctorError, match="no step to save"):
        recorder.save()
    recorder.close()


def test_the_loops_own_rule_for_spikes(tmp_path):
    model, told = nn.Linear(1, 1), []
    with Recorder(model, folder=tmp_path, on_save=lambda path, event: told.append((path, event))) as recorder:
        for step in range(60):
            loss = model(torch.ones(1, 1)).sum() * 0 + (50.0 if step == 40 else 1.0 + step % 3)
            recorder.watch(loss)
            if loss > 10:
                recorder.save("spike")
    [(path, event)] = told
    assert path.name == "step-step000040.pth"
    assert (event["reason"], event["step"], event["loss"]) == ("spike", 40, 50.0)


def test_a_failing_on_save_does_not_end_the_training(tmp_path, caplog):
    def upload(path, event):
        raise ConnectionError("no route")

    model = nn.Linear(1, 1)
    with Recorder(model, folder=tmp_path, on_save=upload) as recorder:
        recorder.watch(model(torch.full((1, 1), float("nan"))).sum())
    assert len(recorder.written) == 1
    assert "on_save failed" in caplog.text
