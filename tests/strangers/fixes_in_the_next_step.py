"""Fixes that hold for this step alone: other numbers, or state that is kept, are different in the next one."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from strangers.fixes_by_meaning import DIVISION, FAR, ZEROS, X, squared
from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
SHOWN = (300 * normal(4, 8)).abs().round().clamp(min=20).index_put((torch.tensor(1), torch.tensor(2)), torch.zeros(()))
COUNTS = {"clicks": (SHOWN * 0.06).round(), "shown": SHOWN, "autocast": False}


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.rate = nn.Parameter(torch.zeros(8))
        self.register_buffer("tau", torch.tensor(0.3))
        self.register_buffer("last", torch.zeros(4, 8))


@rows(DIVISION, COUNTS, loss=squared, fix="none")
class Rate(Stateful):
    def forward(self, clicks, shown):
        return self.lift(clicks / shown)


@rows(DIVISION, {**ZEROS, "autocast": False}, loss=squared, fix="none")
class Annealed(Stateful):
    def forward(self, x):
        return self.lift(x) + torch.tanh(x / self.tau) / x


CLASSES = {**ZEROS, "kind": torch.arange(4), "autocast": False}


@rows(DIVISION, CLASSES, loss=lambda output, batch: F.cross_entropy(output, batch["kind"]), fix="none")
class AnnealedByConfig(Stateful):
    """The limit is a number of a config; the whole numbers of the batch are no others."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(tau=0.3)

    def forward(self, x, kind):
        return self.lift(x) + torch.tanh(x / self.config.tau) / x


@rows(DIVISION, {**ZEROS, "autocast": False}, loss=squared, fix="none")
class RatioOfTwo(Stateful):
    """The limit is the ratio of two elements of one buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.tensor([0.3, 0.7]))

    def forward(self, x):
        return self.lift(x) + torch.expm1(self.rates[0] * x) / torch.expm1(self.rates[1] * x)


def relative(output, batch):
    return ((output - batch["x"]).abs() / torch.maximum(output, batch["x"])).mean()


@rows(DIVISION.replace(".", "<loss>"), {"x": ZEROS["x"], "autocast": False}, loss=relative, fix="none")
class Forecast(nn.Module):
    """1 if the forecast stays at 0 where the number moves off it, and 0 along both."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(8, 8)
        nn.init.constant_(self.lift.bias, -5.0)

    def forward(self, x):
        return self.lift(x).relu()


@rows("numerics . exp exp-overflow", {"x": 400 * normal(4, 8), "autocast": False}, loss=squared, fix="none")
class TwiceInOne(Stateful):
    def forward(self, x):
        return self.lift(x) + torch.log(torch.exp(self.norm(x) * 400).mean())


@rows(DIVISION, {**X, "autocast": False}, loss=lambda output, batch: 1e5 * squared(output, batch), fix="none")
class NeverTrained(Stateful):
    def forward(self, x):
        return self.lift(x) + 1e-6 * torch.expm1(self.rate) / self.rate


@rows(DIVISION, {**ZEROS, "autocast": False}, loss=squared, fix="none")
class Rebound(Stateful):
    def forward(self, x):
        last = torch.sin(x, out=self.last)
        last /= x
        return self.lift(x) + last


@rows("precision . matmul matmul-overflow", {"x": 300 * normal(4, 8)}, loss=squared, fix="verified use-format")
class Remembered(Stateful):
    scores = None

    def forward(self, x):
        lifted = self.lift(x)
        scores = lifted @ lifted.t()
        before = lifted[:, :4] if self.scores is None else torch.lerp(lifted[:, :4], self.scores, 0.5)
        self.scores = scores.detach()
        return torch.softmax(scores + before, -1)


OVERFLOWS = "numerics . exp exp-overflow"
FAR_IN_FP32 = {**FAR, "autocast": False}


@rows(OVERFLOWS, FAR_IN_FP32, loss=squared, fix="none")
class Carried(Stateful):
    """The sums of the powers are added to in the next step, where they have another factor."""

    def forward(self, x):
        powers = torch.exp(x)
        self.last = self.last + powers.sum(-1, keepdim=True)
        return self.lift(powers / powers.sum(-1, keepdim=True))


@rows(OVERFLOWS, FAR_IN_FP32, loss=lambda made, batch: squared(made[0], batch), fix="verified stable-log")
class Flagged(Stateful):
    """Flags of the powers change with a factor, and shares do not."""

    def forward(self, x):
        powers = torch.exp(x)
        return self.lift(powers / powers.sum(-1, keepdim=True)), powers > 5
