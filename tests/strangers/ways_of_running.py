"""Unusual ways of running a forward: loops, checkpoints, compilers, hooks, views, vmap, regions without autocast."""

import torch
from tiny_models import Returns
from torch import nn
from torch.utils.checkpoint import checkpoint

from strangers.rows import Rows
from strangers.visits import Between, normal

rows = Rows()
THREE, FOUR, LOUD = {"x": normal(3, 8)}, {"x": normal(4, 8)}, {"x": 1e3 * normal(3, 8)}
MUL = "precision middle mul elementwise-overflow"


@rows.between("precision middle add elementwise-overflow", THREE)
def accumulation_in_place(x):
    for _ in range(30):
        x += x
    return x


class Checkpointed(nn.Module):
    def __init__(self, function, use_reentrant):
        super().__init__()
        self.entry = nn.Linear(8, 8)
        self.block = Returns(function)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, self.entry(x), use_reentrant=self.use_reentrant)


def square(x):
    return x * x


def distance(x):
    return x + (x - x.detach()).float().abs().sum(-1, keepdim=True).sqrt()


REENTRANT = {
    "loss": lambda output, _: output.sum(),
    "ignores": ("None of the inputs have requires_grad",),  # torch's remark in a run of the forward alone
}
for is_reentrant in (True, False):
    rows("precision block mul elementwise-overflow", LOUD, square, is_reentrant, **REENTRANT)(Checkpointed)
    singular = "numerics block sqrt gradient-singularity"
    rows(singular, THREE, distance, is_reentrant, line=".sqrt()", **REENTRANT)(Checkpointed)


@rows.between(MUL, {"x": 1e3 * normal(30, 8)}, holds=lambda report: "ValueError" in report.runs.autocast.raised)
def distribution_that_validates_its_arguments(x):
    energy = x * x
    return torch.distributions.Normal(energy - energy.mean(), 1.0, validate_args=True).rsample()


class Square(nn.Module):
    def forward(self, x):
        return x * x


@rows("precision middle._orig_mod mul elementwise-overflow", LOUD, line="return x * x")
def block_under_torch_compile():
    return Between(torch.compile(Square(), backend="eager"))


@rows("precision 0 mul elementwise-overflow", THREE, line="register_forward_hook")
def forward_hook_of_the_user():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output * 1e6)
    return model


@rows.between(MUL, LOUD, line="return torch.vmap(lambda row: row * row.norm())(x)")
def under_vmap(x):
    return torch.vmap(lambda row: row * row.norm())(x)


@rows.between("precision middle.own linear input-cast-overflow", THREE)
class WeightTooLargeForItsCast(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x):
        weights = {"weight": self.own.weight * 1e6, "bias": self.own.bias}
        return torch.func.functional_call(self.own, weights, (x,))


@rows.between("precision exit linear input-cast-overflow", LOUD)
def what_leaves_an_fp32_region(x):
    with torch.autocast("cuda", enabled=False):
        return x.float() ** 2


@rows(
    "numerics middle fft_rfft reduction-overflow",
    {"x": normal(3, 64)},
    make=lambda function: Between(Returns(function), width=64),
    call=lambda model, batch: model.middle(model.entry(batch["x"])),
)
def spectrum_that_fp32_cannot_hold(x):
    return torch.fft.rfft(x.float() * 1e38).abs()[:, :8]


@rows(MUL, FOUR, 1e6, 1.0, line="made[:2] = x[:2] * first")
@rows(MUL, FOUR, 1.0, 1e6, line="made[2:] = x[2:] * second")
@rows("healthy", FOUR, 1.0, 1.0)
def written_in_parts(first, second):
    def halves(x):
        made = torch.full_like(x, float("nan"))
        made[:2] = x[:2] * first
        made[2:] = x[2:] * second
        return made.relu()

    return Between(Returns(halves))


@rows.between("numerics middle full_like indeterminate-form", FOUR)
def part_that_nobody_wrote(x):
    made = torch.full_like(x, float("nan"))
    made[:2] = x[:2]
    return made.relu()


@rows.between("numerics middle div division-by-zero", THREE)
def layer_built_in_the_forward(x):
    x = nn.Linear(8, 8, bias=False)(x * (torch.arange(3) != 1)[:, None])
    return x / x.abs().sum(-1, keepdim=True)
