"""Training is the same to the last bit with the recorder on and off."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nandoctor import Recorder, cuda_autocast

NUM_STEPS = 6


class Net(nn.Module):
    """With batch norm and dropout, and its middle under gradient checkpointing if asked for."""

    def __init__(self, *, checkpointed: bool = False, dropout: float = 0.3) -> None:
        super().__init__()
        self.enter, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm, self.dropout, self.checkpointed = nn.BatchNorm1d(8), nn.Dropout(dropout), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(self.enter(x)).relu())
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x)
        return self.head(x.relu())


def loss_of(output, batch):
    return (output - batch[1]).square().mean()


def plain(model, batch, optimizer, watch, *, dtype=None, scaler=None, every=1, step=0):
    """One step of the usual loop, with autocast, a scaler and accumulation where they are asked for."""
    if dtype is None:
        loss = loss_of(model(batch[0]), batch)
    else:
        with cuda_autocast(dtype):
            loss = loss_of(model(batch[0]), batch)
    watch(loss, batch)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if (step + 1) % every:
        return
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def closure(model, batch, optimizer, watch, *, step=0):
    def evaluate():
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch)
        watch(loss, batch)
        loss.backward()
        return loss

    optimizer.step(evaluate)


def with_scaler(*arguments, scaler, **more):
    return plain(*arguments, dtype=torch.float16, scaler=scaler, **more)


CONFIGURATIONS = {
    "fp32": (Net, plain, {}),
    "bf16": (Net, plain, {"dtype": torch.bfloat16}),
    "scaler": (Net, with_scaler, {}),
    "accumulation": (Net, plain, {"every": 3}),
    "batch norm and dropout": (lambda: Net(dropout=0.7), plain, {"dtype": torch.float16}),
    "compiled": (lambda: torch.compile(Net(), backend="eager"), plain, {}),
    "closure": (lambda: Net(dropout=0.0), closure, {}),
    "checkpointing": (lambda: Net(checkpointed=True), plain, {"dtype": torch.bfloat16}),
}


def train(name, folder):
    """Weights, buffers, the optimizer's state and the next random numbers; `folder` is None without a recorder."""
    make, step, more = CONFIGURATIONS[name]
    torch.manual_seed(0)
    model = make()
    lbfgs = step is closure
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3) if lbfgs else torch.optim.AdamW(model.parameters())
    if step is with_scaler:
        more = {**more, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**20)}
    recorder = None if folder is None else Recorder(model, folder=folder, scaler=more.get("scaler"), loss=loss_of)
    watch = (lambda *_: None) if recorder is None else recorder.watch
    for number in range(NUM_STEPS):
        batch = torch.randn(8, 6), torch.randn(8, 1)
        if number == 3 and not lbfgs:
            batch[0][2] = float("inf")  # so that a dump is written on the way
        step(model, batch, optimizer, watch, step=number, **more)
    if recorder is not None:
        recorder.close()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])), torch.rand(3)


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in leaves(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def is_same(one, other):
    """Equal in every bit, NaNs too."""
    if not isinstance(one, torch.Tensor):
        return one == other
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_is_bit_identical_with_a_recorder(tmp_path, name):
    without, recorded = leaves(train(name, None)), leaves(train(name, tmp_path))
    assert len(without) == len(recorded) > 10
    assert all(is_same(one, other) for one, other in zip(without, recorded, strict=True))
    assert bool(list(tmp_path.glob("*.pth"))) is (name != "closure")
