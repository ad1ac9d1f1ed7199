"""What a recorder leaves behind: after a run that was killed, and after one of 2,500 steps."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from nandoctor import Recorder

NUM_STEPS = 2500
STATUS = Path("/proc/self/status")
NUM_KILLS = int(os.environ.get("NUM_KILLS", "24"))
"""NUM_KILLS=200 takes a minute or two more."""
KILLS = """
import os, random, signal, sys, time
from pathlib import Path

import torch
from torch import nn
from nandoctor import Recorder
from nandoctor.dumps.reader import read_dump

folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])
random.seed(0)
halves = read = 0
for number in range(num_kills):
    known = set(folder.glob(".*.tmp"))
    child = os.fork()
    if not child:
        model = nn.Linear(1500, 1500)
        recorder = Recorder(model, folder=folder, keep=3)
        while True:  # nothing but writing, so that this is where it is killed
            recorder.watch(model(torch.ones(1, 1500)).sum())
            recorder.save()
    # While it writes its first file, and after that: the machine may be so busy that chance would give one alone.
    while not set(folder.glob("*.pth" if number % 2 else ".*.tmp")) - known:
        time.sleep(0.0005)
    time.sleep(random.uniform(0, 0.05 if number % 2 else 0.005))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    halves += bool(set(folder.glob(".*.tmp")) - known)
    for path in folder.glob("*.pth"):
        assert read_dump(path).state["weight"].isfinite().all()
        read += 1
        path.unlink()
Recorder(nn.Linear(2, 2), folder=folder).close()
print(halves, read, len(list(folder.iterdir())))
"""


def test_a_new_run_removes_what_a_killed_one_left(tmp_path):
    orphan, other = tmp_path / ".nan-step000004-abc.tmp", tmp_path / "mine.tmp"
    for path in (orphan, other):
        path.write_bytes(b"half a file")
    Recorder(nn.Linear(2, 2), folder=tmp_path).close()
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills its own children")
def test_kills_leave_no_broken_file(tmp_path, ready_python):
    script, folder = tmp_path / "kills.py", tmp_path / "dumps"
    script.write_text(KILLS)
    folder.mkdir()
    done = ready_python.run(script, folder, NUM_KILLS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    halves, read, left = map(int, done.stdout.split())
    assert halves > NUM_KILLS / 4  # killed while it wrote
    assert read > NUM_KILLS / 4
    assert left == 0


@pytest.mark.parametrize("is_own", [True, False], ids=["model's", "other's"])
def test_dropped_optimizers_are_not_kept(tmp_path, is_own):
    """A meta-learner makes one for each task; each was held, with its state and a copy of the weights."""
    model, held = nn.Linear(4, 1), []
    with Recorder(model, folder=tmp_path) as recorder:
        for _ in range(6):
            trained = model if is_own else nn.Linear(4, 1)
            recorder.watch(model(torch.ones(2, 4)).sum())
            trained(torch.ones(2, 4)).sum().backward()
            optimizer = torch.optim.Adam(trained.parameters())
            optimizer.step()
            held.append(weakref.ref(optimizer))
        del optimizer
        gc.collect()
        assert sum(optimizer() is not None for optimizer in held) <= 1


@pytest.mark.slow
def test_a_long_run_leaks_nothing(tmp_path, caplog):
    """Memory and the number of objects after 2,500 steps, every hundredth of them non-finite, beside 500.

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
            if step % 500 == 499:
                caplog.clear()
                gc.collect()
                measured.append((len(gc.get_objects()), int(STATUS.read_text().split("RssAnon:")[1].split()[0])))
    assert len(recorder.written) > 1
    objects, memory = zip(*measured, strict=True)
    assert max(objects) - objects[0] < 200
    assert max(memory) - memory[0] < 8 << 10  # KiB
