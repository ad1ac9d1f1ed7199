"""Training loops as people write them, around one small model: each trains a `Run`, with a recorder or without."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nandoctor import Recorder, cuda_autocast

LR, EVERY = 0.01, 4


class Net(nn.Module):
    """Divides by the norm of each row: 0/0 for a row of zeros. If it multiplies instead, the gradients are NaN."""

    def __init__(self, divides: bool = False) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8, bias=False), nn.Linear(8, 1)
        self.norm, self.dropout, self.divides = nn.BatchNorm1d(8, affine=False), nn.Dropout(0.2), divides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        norm = hidden.square().sum(-1, keepdim=True).sqrt()
        return self.leave(self.dropout(self.norm(hidden / norm if self.divides else hidden * norm)))


def loss_of(output, batch):
    return (output - batch[1]).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, LR)


def adam(parameters):
    return torch.optim.AdamW(parameters, LR)


def fused(parameters):
    return torch.optim.AdamW(parameters, LR, fused=True)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, LR, max_iter=3)


@dataclass(kw_only=True)
class Run:
    """A model, its batches and its optimizer; `what` fails at batch `failing`. Without a folder nothing is recorded."""

    what: str = ""
    folder: Path | None = None
    make_optimizer: Callable[..., Any] = sgd
    scales: bool = False
    dtype: torch.dtype | None = None
    compiles: bool = False
    num_batches: int = 6
    failing: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net(divides=self.what == "loss")
        self.model = torch.compile(self.net, backend="eager") if self.compiles else self.net
        self.optimizer = self.make_optimizer(self.net.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if self.scales else None
        self.batches = [(torch.randn(5, 4), torch.randn(5, 1)) for _ in range(self.num_batches)]
        if self.what in ("loss", "gradients"):
            self.batches[self.failing][0][2] = 0
        self.states: list[dict[str, torch.Tensor]] = []
        self.recorder = None
        if self.folder is not None:
            given = {"loss": loss_of, "arguments": {"divides": self.net.divides}, **self.options}
            self.recorder = Recorder(self.model, folder=self.folder, scaler=self.scaler, **given)

    def __iter__(self) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield the batches, and note the state that each of them meets."""
        for number, batch in enumerate(self.batches):
            self.states.append({name: tensor.clone() for name, tensor in self.net.state_dict().items()})
            yield number, batch

    def step(self, batch: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.recorder is None else self.recorder.step(batch)

    def watch(self, loss: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.recorder is not None:
            self.recorder.watch(loss, batch)
        return loss

    def loss(self, batch: Any) -> torch.Tensor:
        with nullcontext() if self.dtype is None else cuda_autocast(self.dtype):
            loss = loss_of(self.model(batch[0]), batch)
        return self.watch(loss, batch)

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self, number: int, *optimizers: torch.optim.Optimizer, closure: Any = None) -> None:
        """Take the step of the optimizer, or of these; from where it is to fail, its learning rate is infinite."""
        for optimizer in optimizers or (self.optimizer,):
            fails = self.what == "update" and number >= self.failing
            optimizer.param_groups[0]["lr"] = float("inf") if fails else LR
            if self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step(closure)
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in () if closure else optimizers or (self.optimizer,):
            optimizer.zero_grad()


def plain(run):
    for number, batch in run:
        run.backward(run.loss(batch))
        run.update(number)


def marked(run):
    for number, batch in run:
        with run.step(batch):
            run.backward(run.loss(batch))
            run.update(number)


def update_after_the_block(run):
    for number, batch in run:
        with run.step(batch):
            loss = run.loss(batch)
        run.backward(loss)
        run.update(number)


def hooks_alone(run):
    """A trainer that calls model, loss and optimizer itself lets others in at the beginning and the end of a batch."""
    for number, batch in run:
        if run.recorder is not None:
            run.recorder.begin(batch)
        run.backward(loss_of(run.model(batch[0]), batch))
        run.update(number)
        if run.recorder is not None:
            run.recorder.end()


def accumulation(run):
    for number, batch in run:
        run.backward(run.loss(batch) / EVERY)
        if number % EVERY == EVERY - 1:
            run.update(number)


def marked_accumulation(run):
    """The loop marks each micro-batch, and the optimizer steps outside."""
    for number, batch in run:
        with run.step(batch):
            loss = run.loss(batch)
        run.backward(loss / EVERY)
        if number % EVERY == EVERY - 1:
            run.update(number)


def two_optimizers(run):
    optimizers = [torch.optim.AdamW(part.parameters(), LR) for part in (run.net.enter, run.net.leave)]
    for number, batch in run:
        run.backward(run.loss(batch))
        run.update(number, *optimizers)


def one_of_two_after_the_block(run):
    inside, outside = (torch.optim.SGD(part.parameters(), LR) for part in (run.net.enter, run.net.leave))
    for number, batch in run:
        with run.step(batch):
            run.backward(run.loss(batch))
            run.update(number, inside)
        run.update(number, outside)


def closures(run, mark=lambda run, batch: nullcontext()):
    for number, batch in run:

        def closure(batch=batch):
            run.optimizer.zero_grad()
            loss = run.loss(batch)
            loss.backward()
            return loss

        with mark(run, batch):
            run.update(number, closure=closure)


def marked_closures(run):
    closures(run, Run.step)


def checkpointed(run):
    for number, batch in run:
        loss = loss_of(checkpoint(run.model, batch[0], use_reentrant=False), batch)
        run.backward(run.watch(loss, batch))
        run.update(number)


def one_buffer(run):
    """Each batch is written over the one before it, and a loss that is NaN is left out by the loop itself."""
    buffer = torch.empty(5, 4), torch.empty(5, 1)
    for number, batch in run:
        for target, source in zip(buffer, batch, strict=True):
            target.copy_(source)
        loss = run.loss(buffer)
        if loss.isfinite():
            run.backward(loss)
            run.update(number)


def back_to_a_checkpoint(run):
    for number, batch in run:
        loss = run.loss(batch)
        if loss.isfinite():
            run.backward(loss)
            run.update(number)
        else:
            run.net.load_state_dict(run.states[0])


LONG = {"num_batches": 12, "failing": 5}
LOOPS: dict[str, tuple[Callable[[Run], None], dict[str, Any]]] = {
    "plain": (plain, {}),
    "Adam": (plain, {"make_optimizer": adam}),
    "fused": (plain, {"make_optimizer": fused}),
    "compiled": (plain, {"compiles": True}),
    "bf16": (plain, {"dtype": torch.bfloat16}),
    "scaler": (plain, {"scales": True, "dtype": torch.float16}),
    "scaler, fused": (plain, {"scales": True, "make_optimizer": fused}),
    "scaler, marked": (marked, {"scales": True}),
    "marked": (marked, {}),
    "update after the block": (update_after_the_block, {}),
    "hooks alone": (hooks_alone, {}),
    "accumulation": (accumulation, LONG),
    "accumulation, marked": (marked_accumulation, LONG),
    "accumulation, scaler": (accumulation, {**LONG, "scales": True}),
    "two optimizers": (two_optimizers, {}),
    "two optimizers, scaler": (two_optimizers, {"scales": True}),
    "one of two after the block": (one_of_two_after_the_block, {}),
    "closure": (closures, {"make_optimizer": adam}),
    "LBFGS": (closures, {"make_optimizer": lbfgs}),
    "LBFGS, marked": (marked_closures, {"make_optimizer": lbfgs}),
    "checkpointing": (checkpointed, {}),
    "one buffer": (one_buffer, {}),
    "back to a checkpoint": (back_to_a_checkpoint, {}),
}
