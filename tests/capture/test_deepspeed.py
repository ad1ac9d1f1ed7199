"""DeepSpeed's engine: it frees the gradients, steps master weights and scales the loss, all out of sight of torch."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nandoctor
from nandoctor import NanDoctorError, Recorder
from nandoctor.dumps.reader import read_dump


class Net(nn.Module):
    """A loss scale or a row of zeros makes its gradients non-finite, and leaves the loss finite."""

    def __init__(self, width=8):
        super().__init__()
        self.enter, self.head = nn.Linear(4, width, bias=False), nn.Linear(width, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        hidden = self.enter(x)
        return self.head(self.drop(hidden * torch.sqrt(hidden.square().sum(-1, keepdim=True))))


def loss_of(output, batch):
    return F.cross_entropy(output, batch[1])


class EngineLike(nn.Module):
    """What the recorder uses of an engine, done as ZeRO does it."""

    def __init__(self, module, *, scale=None, every=1, stage=2):
        super().__init__()
        self.module, self.every, self.stage, self.scale = module, every, stage, scale
        self.global_steps = self.micro_steps = 0
        self.masters = [p.detach().clone() for p in module.parameters()]
        self.sums = [torch.zeros_like(p) for p in module.parameters()]
        inner = torch.optim.AdamW(self.masters, lr=1e-3)
        self.inner, self.norm = inner, None
        self.optimizer = SimpleNamespace(param_groups=inner.param_groups, overflow=False, cur_scale=scale or 1.0)

    def forward(self, *args):
        return self.module(*args)

    def backward(self, loss):
        (loss * self.optimizer.cur_scale / self.every).backward()
        for parameter, total in zip(self.module.parameters(), self.sums, strict=True):
            total.add_(parameter.grad)
            parameter.grad = None

    def step(self):
        if self.is_gradient_accumulation_boundary():
            self.take_step()
        self.micro_steps += 1

    def take_step(self):
        norm = float(torch.stack([total.norm() for total in self.sums]).norm()) / self.optimizer.cur_scale
        self.norm, self.optimizer.overflow = norm, not math.isfinite(norm)
        self.global_steps += 1
        if not self.optimizer.overflow:
            for master, total in zip(self.masters, self.sums, strict=True):
                master.grad = total / self.optimizer.cur_scale
            self.inner.step()
            with torch.no_grad():
                for parameter, master in zip(self.module.parameters(), self.masters, strict=True):
                    parameter.copy_(master)
        for total in self.sums:
            total.zero_()

    def is_gradient_accumulation_boundary(self):
        return (self.micro_steps + 1) % self.every == 0

    def gradient_accumulation_steps(self):
        return self.every

    def zero_optimization_stage(self):
        return self.stage

    def fp16_enabled(self):
        return self.scale is not None

    def get_global_grad_norm(self):
        return self.norm


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    stand_in = ModuleType("deepspeed.runtime.engine")
    stand_in.DeepSpeedEngine = EngineLike
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", stand_in)


def train(folder, what, *, every=1, **options):
    """8 updates of which one goes wrong; the module, and the recorder's files."""
    torch.manual_seed(0)
    engine = EngineLike(Net(), every=every, **options)
    recorder = None if folder is None else Recorder(engine, folder=folder, loss=loss_of)
    for number in range(8 * every):
        batch = torch.randn(4, 4), torch.randint(3, (4,))
        if number == 4 * every + every - 1 and what == "gradients":
            batch[0][2] = 0
        if number == 5 * every and what == "update":
            engine.inner.param_groups[0]["lr"] = math.inf
        loss = loss_of(engine(batch[0]), batch)
        if recorder is not None:
            recorder.watch(loss, batch)
        engine.backward(loss)
        engine.step()
    if recorder is not None:
        recorder.close()
        assert "step" not in vars(engine)
    return engine.module, () if recorder is None else recorder.written


@pytest.mark.parametrize(
    ("what", "options", "expected"),
    [
        ("gradients", {}, ("gradients", 4, 0, "gradient-singularity")),
        ("gradients", {"every": 3}, ("gradients", 4, 2, "gradient-singularity")),
        ("gradients", {"scale": 256.0}, ("skipped", 4, 0, "gradient-singularity")),
        ("update", {}, ("update", 5, 0, "nonfinite-update")),
    ],
)
def test_the_update_that_failed_is_saved_and_replayed(tmp_path, what, options, expected):
    plain, _ = train(None, what, **options)
    module, (path, *_) = train(tmp_path, what, **options)
    for one, other in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    saved = read_dump(path)
    assert (saved.scalars["reason"], saved.scalars["step"], saved.scalars["micro_batch"]) == expected[:3]
    assert all(value.isfinite().all() for value in saved.state.values())
    report = nandoctor.replay(path, model=Net, loss=loss_of, fixes=False).report
    assert (report.reproduction.grade, report.cause.code) == ("exact", expected[3])


def test_weights_in_pieces_are_refused(tmp_path):
    with pytest.raises(NanDoctorError, match="ZeRO-3"):
        Recorder(EngineLike(Net(), stage=3), folder=tmp_path)
