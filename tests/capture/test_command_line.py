"""A script that trains, dies and leaves a file; `nandoctor replay FILE` and nothing more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from torch import nn
import torch.nn.functional as F
import nandoctor


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.dropout(self.norm(x)) * x.abs())


def loss_of(output, batch):
    return F.mse_loss(output, batch["y"])


def main():
    torch.manual_seed(0)
    model = Net(dropout=0.4)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with nandoctor.Recorder(model, scaler=scaler, loss=loss_of, arguments={"dropout": 0.4}, in_a_row=1) as recorder:
        for number in range(10):
            batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
            batch["x"][5] *= 1e6 if number == 4 else 1
            with nandoctor.cuda_autocast():
                loss = loss_of(model(batch["x"]), batch)
            recorder.watch(loss, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
"""


def run(folder, *command):
    environment = {**os.environ, "PWD": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    (folder / "train.py").write_text(SCRIPT)
    done = run(folder, "train.py")
    assert done.stderr.splitlines()[-2:] == [
        "nandoctor.errors.NonFiniteTrainingError: The recorder stopped the training at step 4: 1 non-finite step.",
        "Saved to dumps/nan-step000004.pth; next: nandoctor replay dumps/nan-step000004.pth",
    ]
    return folder


def test_the_command_that_the_error_names_needs_no_flags(folder, run_nandoctor):
    done = run_nandoctor("replay", "--json", "dumps/nan-step000004.pth", cwd=folder)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["reproduction"]["grade"]) == ("precision", "exact")
    assert report["first_nonfinite"]["samples"] == [5]
    assert report["bad_gradients"]
    assert report["notes"] == ["Replayed as model(x) in train mode, the saved random state."]


def test_elsewhere_it_says_what_to_type(folder, tmp_path, run_nandoctor):
    done = run_nandoctor(
        "replay", folder / "dumps" / "nan-step000004.pth", cwd=tmp_path, environment={"COLUMNS": "100"}
    )
    assert done.returncode == 1
    assert "train.py is not in the working directory" in done.stderr
    assert (
        f"nandoctor replay {folder}/dumps/nan-step000004.pth --model train.py:Net --model-arg dropout=0.4"
        in done.stderr
    )


def test_inspect_tells_what_it_is_without_the_code(folder, tmp_path, run_nandoctor):
    done = run_nandoctor(
        "inspect", folder / "dumps" / "nan-step000004.pth", cwd=tmp_path, environment={"COLUMNS": "100"}
    )
    assert "nandoctor.dump/1" in done.stdout
    told = " ".join(done.stdout.split())
    for text in ("model: train.py:Net", "arguments: dropout=0.4", "method: forward", "loss: train.py:loss_of"):
        assert text in told
    assert "missing" not in done.stdout
