"""Dumps whose code has changed since they were written."""

from __future__ import annotations

import importlib
import sys

import torch

from nandoctor import Recorder
from nandoctor.fleet.worker import Job, run_job
from nandoctor.step.settings import Settings

CODE = """
import torch
from torch import nn

class RootOfTriage(nn.Linear):
    def forward(self, x):
        return super().forward(x).sum(-1).sqrt()

def loss_of(output, batch):
    return output.mean()
"""


def test_a_step_that_passes_since_a_change_is_fixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "net_of_triage.py"
    file.write_text(CODE)
    net = importlib.import_module(file.stem)
    model = net.RootOfTriage(2, 2)
    torch.nn.init.constant_(model.bias, -100.0)
    arguments = {"in_features": 2, "out_features": 2}
    with Recorder(model, folder=tmp_path / "dumps", loss=net.loss_of, arguments=arguments) as recorder:
        recorder.watch(net.loss_of(model(torch.ones(3, 2)), None), torch.ones(3))
    del sys.modules[file.stem]
    job = Job(path=recorder.written[0], shown="a", key="", settings=Settings(fixes=False), cwd=tmp_path)
    assert run_job(job).result.finding.verdict == "numerics"
    file.write_text(CODE.replace(".sqrt()", ".abs().sqrt()"))
    assert run_job(job).result.finding.verdict == "fixed"
