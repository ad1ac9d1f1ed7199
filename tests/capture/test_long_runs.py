"""What a recorder leaves behind: after a run that was killed, and after one of 5,000 steps."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from nandoctor import Recorder
from nandoctor.machine import anonymous_memory

NUM_STEPS = 5000


def test_a_new_run_removes_what_a_killed_one_left(tmp_path):
    orphan, other = tmp_path / ".nan-step000004-abc.tmp", tmp_path / "mine.tmp"
    for path in (orphan, other):
        path.write_bytes(b"half a file")
    Recorder(nn.Linear(2, 2), folder=tmp_path).close()
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.slow
def test_a_long_run_leaks_nothing(tmp_path, caplog):
    """Memory and the number of objects after 5,000 steps, every hundredth of them non-finite, beside 1,000.

    The files that it writes are part of it.
    """
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    measured = []
    with Recorder(model, folder=tmp_path, threshold=1) as recorder:
        for step in range(NUM_STEPS):
            x = torch.full((8, 64), float("nan") if step % 100 == 50 else 1.0)
            loss = model(x).sum()
            recorder.watch(loss, x)
            optimizer.zero_grad()
            if step % 100 != 50:
                loss.backward()
                optimizer.step()
            if step % 1000 == 999:
                caplog.clear()
                gc.collect()
                measured.append((len(gc.get_objects()), anonymous_memory()))
    assert len(recorder.written) > 1
    objects, memory = zip(*measured, strict=True)
    assert max(objects) - objects[0] < 200
    assert memory[0] is None or max(memory) - memory[0] < 8 << 20
