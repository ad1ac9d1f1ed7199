"""Training scripts as people write them: no main guard, no close, an error of their own at the end."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trainings import Gambler

import nandoctor
from nandoctor import Recorder, cuda_autocast
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.engine.user_code import project_of

SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F, nandoctor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.dropout(x) * 1e6)

{early}
model = Net()
recorder = nandoctor.Recorder(model, loss=loss_of)
{late}
print("training")
x, y = torch.randn(4, 8), torch.randint(2, (4,))
with nandoctor.cuda_autocast():
    loss = loss_of(model(x), (x, y))
recorder.watch(loss, (x, y))
{end}
"""
LOSS = "def loss_of(output, batch):\n    return F.cross_entropy(output.float(), batch[1])\n"


class RealPython:
    """A process of its own, which ends as one does; `ready_python` is faster."""

    @staticmethod
    def run(script, *, cwd):
        environment = {**os.environ, "PWD": str(cwd), "PYTHONPATH": str(Path(nandoctor.__file__).parent.parent)}
        return subprocess.run(
            [sys.executable, script], cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )


def train(folder, python, **parts):
    (folder / "train.py").write_text(SCRIPT.format(**{"early": LOSS, "late": "", "end": "", **parts}))
    return python.run(folder / "train.py", cwd=folder)


@pytest.mark.slow
def test_a_script_that_trains_on_import_does_not_train_again(tmp_path, ready_python, run_nandoctor):
    train(tmp_path, ready_python)
    replay = run_nandoctor("replay", "dumps/nan-step000000.pth", cwd=tmp_path)
    assert "all others identical" in " ".join(replay.stdout.split())
    assert "train.py:9" in replay.stdout
    assert "gradients" in replay.stdout
    assert "training" not in replay.stdout.splitlines()
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["nan-step000000.pth"]


@pytest.mark.parametrize(("own", "expected"), [(True, ["train.py", "--gain", "3"]), (False, ["train.py"])])
def test_a_strangers_arguments_reach_no_code(own, expected):
    recorded = Recorded(argv=("--gain", "3"))
    dump = SimpleNamespace(recorded=recorded, provenance=SimpleNamespace(own=own))
    with project_of(dump).as_program("train.py"):
        assert sys.argv == expected
    assert sys.argv != expected


@pytest.mark.parametrize("end", ["raise RuntimeError('my own check')", "raise KeyboardInterrupt", ""])
@pytest.mark.slow
def test_an_unclosed_recorder_checks_the_last_step_at_exit(tmp_path, ready_python, end):
    training = train(tmp_path, ready_python if end else RealPython, end=end)
    assert "next: nandoctor replay dumps/nan-step000000.pth" in training.stderr
    assert torch.load(tmp_path / "dumps" / "nan-step000000.pth", weights_only=True)["event"]["step"] == 0
    assert (training.returncode == 0) is (end == "")


def difference(a, b):
    """A loss that takes two outputs, and so not the (output, batch) that a replay hands it."""
    return (a.float() - b.float()).square().mean()


def test_a_loss_that_cannot_be_replayed_becomes_a_note(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    model = Gambler()
    with Recorder(model, folder=tmp_path, loss=difference) as recorder:
        with cuda_autocast():
            loss = difference(model(torch.randn(4, 4)), model(1e5 * torch.randn(4, 4)))
        recorder.watch(loss, torch.zeros(1))
    report = nandoctor.replay(recorder.written[0], fixes=False).report
    assert report.reproduction.grade == "exact"
    assert report.reproduction.output == "output.1"
    assert any("The loss function raised AttributeError" in note for note in report.notes)
