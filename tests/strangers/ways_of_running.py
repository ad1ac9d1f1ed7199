"""Unusual ways of running a forward: loops, checkpoints, compilers, hooks, vmap, eval mode alone, fp8, `.data`."""

import math

import torch
from tiny_models import Returns
from torch import nn
from torch.utils.checkpoint import checkpoint

from strangers.rows import Rows
from strangers.visits import Between, mean_square, normal

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


def never(graph, inputs):
    raise AssertionError("a replay compiles nothing, in no run and in no backward pass")


@torch.compile(backend=never)
def gated(x):
    return x * x


@rows.between(MUL, LOUD, line="return x * x", loss=mean_square, fix="verified *")
def recomputed_and_compiled(x):
    return checkpoint(gated, x, use_reentrant=False)


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


# --- models that refuse train mode, which a replay tries first: the step was one of evaluation, and that is replayed


X, REFUSED = {"x": normal(3, 8)}, "In train mode the model does not run"


@rows("numerics . log log-of-zero", X, mode=None, says=(REFUSED, "targets should not be None"))
class Detector(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)

    def forward(self, x, targets=None):
        if self.training and targets is None:
            raise ValueError("targets should not be None when in training mode")
        return torch.log(super().forward(x).relu().float())


# --- a module that computes in fp8 by itself is run as it is, and the report says what that means


BATCH = {"x": normal(4, 8)}


@rows("*", BATCH, 1.0, never=("in fp8-e5m2 (first: ",))
@rows("*", BATCH, 1e6, says=("in fp8-e5m2 (first: ",))
class Quantized(nn.Module):
    """Casts to fp8 in its own forward, without a module or a class that says so: a matter of bits, and told as that."""

    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x):
        return (self.linear(x).float() * self.scale).to(torch.float8_e5m2).float()


# --- writes that autograd does not count, tensors that lie in another's memory, and memory that is not filled yet


class Scaled(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("average", torch.ones(8))
        with torch.no_grad():
            self.scale[3] = scale


@rows.between("precision middle mul elementwise-overflow", BATCH, line="x.data[:, :4] *= 1e6")
def activation_that_is_written_to_through_data(x):
    x = x.clone()
    x.data[:, :4] *= 1e6
    return x


@rows("precision . mul elementwise-overflow", BATCH)
class RunningAverageThatIsWrittenToThroughData(Scaled):
    def forward(self, x):
        self.average.data.copy_(self.inner(x).mean(0) * 1e7)
        return self.inner(x + self.average)


@rows("state . - poisoned-weights", BATCH, math.nan)
class WeightThatIsReadThroughData(Scaled):
    def forward(self, x):
        return self.inner(x * self.scale.data)


@rows("healthy", BATCH, math.nan)
class WeightThatIsMendedThroughData(Scaled):
    def forward(self, x):
        self.scale.data.nan_to_num_(1.0)
        return self.inner(x * self.scale)


def only_nan(report):
    return report.origin.elements.kinds == ("nan",)


@rows("numerics .", BATCH, line="math.nan", holds=only_nan)
class ConstantOfTheCodesOwnThatIsNan(Scaled):
    def forward(self, x):
        return self.inner(x) * torch.tensor([1.0, math.nan] * 4)
