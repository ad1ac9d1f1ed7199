"""Targets, weights and infinities that were there before: told as what they are, in numbers that do not conflict."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from strangers.rows import Rows
from strangers.visits import Lifted, mean_square, normal

rows = Rows()
X = {"x": normal(4, 8)}
TARGET = "input . - poisoned-target"
LOSSES = {
    "mse": F.mse_loss,
    "selected": lambda out, target: (out[:, 2] - target[:, 2]).square().mean(),
    "cast": lambda out, target: (out - target.half().float()).abs().mean(),
}


def with_target(number):
    values = normal(4, 8)
    values[1, 2] = number
    return {**X, "target": values}


def of_target(name):
    return lambda out, batch: LOSSES[name](out.float(), batch["target"])


def linear():
    return nn.Linear(8, 8)


@rows(
    "input . - poisoned-input",
    {"x": with_target(-math.inf)["target"]},
    loss=mean_square,
    samples=(1,),
)
def saturated():
    """Its output is finite, and the gradients of its weights are 0 * -Inf."""
    return nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())


for name in LOSSES:
    rows(TARGET, with_target(math.nan), name=f"{name} of NaN", loss=of_target(name))(linear)
    rows("healthy", with_target(0.5), name=name, loss=of_target(name))(linear)
rows(TARGET, with_target(-math.inf), name="mse of -Inf", loss=of_target("mse"))(linear)


class OwnLoss(nn.Module):
    """A model that is given the target as well and computes its loss; `mixed` is what its layer reads of both."""

    def __init__(self, loss, mixed):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.loss = loss
        self.mixed = mixed

    def forward(self, x, target):
        out = self.layer(self.mixed(x, target)).float()
        return {"loss": self.loss(out, target), "out": out}


def looked_at(x, target):
    """The target is looked at, and not let through."""
    return torch.where(target.isnan(), x, target)


OWN_LOSSES = {
    "mse": F.mse_loss,
    "logits": lambda out, target: F.binary_cross_entropy_with_logits(out[1:].flatten(), target[1:].flatten()),
}
for name, own in OWN_LOSSES.items():
    rows(TARGET, with_target(math.nan), own, looked_at, name=f"own {name}")(OwnLoss)
rows("input . - poisoned-input", with_target(math.nan), F.mse_loss, torch.add, name="read by the layers too")(OwnLoss)

PAST = {"says": ("1,000,000", "65,504"), "holds": lambda report: "non-finite" not in report.cause.explanation}


@rows("state 0 - poisoned-weights", {"input": normal(4, 8)}, 1e6, **PAST)
@rows("healthy", {"input": normal(4, 8)}, 1e3)
def with_weight(value):
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight[0, 0] = value
    return nn.Sequential(layer)


def gated(product, floor):
    """Logarithms of a gate that is zero or one, gathered by a product with mostly zeros."""

    def gather(h, x):
        gate = (h > 0).float()
        return product(torch.eye(4), torch.log(gate.clamp(min=floor) if floor else gate))

    return Lifted(gather)


PRODUCTS = {"matmul": torch.matmul, "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b)}
for op, product in PRODUCTS.items():
    rows(f"numerics . {op} indeterminate-form", X, product, 0.0, name=f"0 * inf in {op}", says=("0 * inf",))(gated)
    rows("healthy", X, product, 1e-3, name=f"{op} without infinities")(gated)


class Masked(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, :-1]


IDLE = {
    "row that no id asks for": (lambda: nn.Embedding(9, 4), "weight", {"x": torch.tensor([[0, 1, 2]])}),
    "running statistics in train mode": (lambda: nn.BatchNorm1d(4), "running_var", {"x": normal(5, 4)}),
    "bias under a mask": (lambda: Masked(4, 4), "bias", {"x": normal(5, 4)}),
}


def ending_with(make, name, value):
    """State that the step does not suffer from."""
    model = make()
    with torch.no_grad():
        getattr(model, name).view(-1)[-1] = value
    return model


for kind, (make, name, batch) in IDLE.items():
    said = (f"`{name}` in 1 of",)
    rows("healthy", batch, make, name, torch.nan, name=f"NaN in a {kind}", says=said)(ending_with)
    rows("healthy", batch, make, name, 1.0, name=kind, never=said)(ending_with)

SPOILT = ("in `deviation`",)


@rows("cannot-tell", {"x": normal(1, 8)}, name="deviation of one row", says=SPOILT, inputs="x")
@rows("healthy", {"x": normal(3, 8)}, name="deviation of three rows", inputs="x")
class Statistics(nn.Module):
    """It keeps a moving deviation of its batches, and a mask that its first forward fills in."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(8, 4)
        self.register_buffer("deviation", torch.ones(4))
        self.register_buffer("mask", torch.zeros(4, 4))

    def forward(self, x):
        out = self.read(x)
        self.mask += torch.full((4, 4), -math.inf).triu(1)
        self.deviation.lerp_(out.detach().float().std(0), 0.1)
        return out


@rows("cannot-tell", {"x": normal(3, 8)}, says=("Inf in `deviation`",), inputs="x")
class BufferThatOverflows(Statistics):
    def forward(self, x):
        self.deviation += self.read(x).detach().float().mul(1e30).square().sum(0)
        return self.read(x)


@rows("precision 0 - poisoned-weights", X, 1e6, loss=mean_square)
@rows("state 0 - poisoned-weights", X, math.inf, loss=mean_square)
def weight_past_fp16_that_the_forward_hides(weight):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Tanh())
    with torch.no_grad():
        model[0].weight[0, 0] = weight
    return model


def with_a_log(out, batch):
    return out.float().mean() + torch.log(batch["x"].mean() - 1.0)


ZEROS, FIRST = {"x": torch.zeros(4, 8)}, {"also": ("eps-underflow",), "loss": with_a_log}


@rows("state . - poisoned-weights", ZEROS, math.nan)
@rows("precision . div eps-underflow", ZEROS, 1.0)
@rows("numerics <loss> log invalid-domain", ZEROS, 1.0, name="what fails in fp32 comes first", **FIRST)
class Scaled(nn.Module):
    """A norm whose eps fp16 loses, and a weight after it."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), weight))
        self.layer = nn.Linear(8, 8)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        h = self.layer(x)
        return h / ((h * h).mean(-1, keepdim=True) + 1e-9).sqrt() * self.weight


def with_an_infinite_scale(model):
    return {**X, "state_dict": {**model.state_dict(), "scale": torch.ones(8).index_fill(0, torch.tensor(3), math.inf)}}


@rows("state . - poisoned-buffers", with_an_infinite_scale, loss=lambda out, _: out.float().sum())
class Whitened(nn.Module):
    """Its output hides an infinite statistic, which the gradient of the layer after it is multiplied by."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return torch.tanh(self.layer(x * self.scale).float())
