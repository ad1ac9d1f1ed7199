"""Mechanisms that stranger code showed: each with unlike cases, as the forward under examination beside its answer."""

import contextlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import nandoctor
from strangers.rows import Rows
from strangers.visits import mean, mean_square, normal

rows = Rows()


class Base(nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, part in layers().items():
            is_buffer = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)


def saved(batch, autocast):
    """The batch with what the model gives for it, as a loop saves it."""

    def save(model):
        with nandoctor.cuda_autocast() if autocast else contextlib.nullcontext():
            output = model(**batch)
        return {**batch, **({"logit": output.detach()} if isinstance(output, torch.Tensor) else {"autocast": False})}

    return save


def body():
    return {"body": nn.Linear(3, 2)}


def step(name, words, batch, layers=body, *, autocast=False, **more):
    """A row for the decorated forward, of a model with these layers."""

    def make(forward):
        return type("Net", (Base,), {"forward": forward})(layers)

    return rows(words, saved(batch, autocast), make=make, name=name, mode=None, **more)


def scaled(layer, gain):
    with torch.no_grad():
        layer.weight.mul_(gain)
    return layer


# Precision is not the story of a step that fails in fp32 too.


def wide():
    return {"wide": scaled(nn.Linear(6, 6), 1e6), "narrow": nn.Linear(6, 6)}


LOG = "numerics * log log-of-zero"
SHARE = {"line": "torch.log(share)", "never": ("fp16", "65,504", "autocast")}


@step("0 * log(0) behind values of 1e5", LOG, {"x": normal(4, 6)}, wide, **SHARE)
@step("recorded in fp16, and wrong in fp32", LOG, {"x": normal(4, 6)}, wide, autocast=True, **SHARE)
def entropy(self, x):
    share = torch.relu(self.narrow(self.wide(x) * 1e-5) - 50)
    return (share * torch.log(share)).sum(-1)


DIVISION = "numerics * div division-by-zero"
COUNTS = {"x": normal(4, 6), "count": torch.tensor([3.0, 0.0, 2.0, 1.0]), "autocast": False}
OFF = {"line": "/ count", "samples": (1,), "never": SHARE["never"]}


@step("a count of 0, in a file that says that autocast was off", DIVISION, COUNTS, wide, **OFF)
def ratio(self, x, count, **_):
    pooled = self.wide(x).sum(-1)
    return pooled * 1e-6 / count


# A value that something removes in the forward, and whose infinite derivative meets a zero gradient.

WIDTHS = {"x": normal(4, 3), "width": torch.tensor([[1.0], [0.5], [0.0], [2.0]])}
TRAP, SINGULAR = "numerics * {} where-gradient-trap", "numerics * {} gradient-singularity"


def removed(name, words, line, batch=WIDTHS, *, samples=(2,), loss=mean_square, **more):
    return step(name, words, batch, line=line, samples=samples, loss=loss, **more)


@removed("atan of x / 0", DIVISION, "/ width", holds=lambda report: report.growth == ())
def angle(self, x, width):
    return torch.atan(self.body(x) / width)


@removed("sigmoid of log(0)", LOG, "torch.log")
def odds(self, x, width):
    return torch.sigmoid(torch.log(torch.sigmoid(self.body(x)) * width))


@removed("1 / (1 + 0 ** -2)", "numerics * pow division-by-zero", "distance**-2")
def falloff(self, x, width):
    distance = self.body(x).square() * width
    return 1 / (1 + distance**-2)


@removed("a minimum with a cap", TRAP.format("rsqrt"), "torch.rsqrt")
def capped(self, x, width):
    inverse = torch.rsqrt(self.body(x).square() * width)
    return torch.minimum(inverse, torch.full_like(inverse, 3.0))


@removed("a product with a mask", TRAP.format("sqrt"), "torch.sqrt", loss=mean)
def multiplied(self, x, width):
    root = torch.sqrt(self.body(x).square() * width)
    return root * 0.5 * (width > 0).float()


# A buffer that the failing forward itself has spoilt, and that the file then holds: both are mended together.


def centred():
    return {**body(), "center": torch.zeros(())}


FAR = {"x": 700 * normal(3, 3)}


@step(
    "a center", "precision * mul elementwise-overflow", FAR, centred, autocast=True, line="* hidden", fix="verified *"
)
def energy(self, x):
    hidden = self.body(x)
    energy = hidden * hidden - self.center
    if self.training:
        self.center.mul_(0.9).add_(0.1 * energy.detach().float().mean())
    return F.layer_norm(energy.float(), energy.shape[-1:])


# A selection that keeps the value is not blamed.

EQUAL = {"x": normal(4, 3), "other": normal(4, 3) + torch.tensor([[0.0], [1.0], [-2.0], [3.0]])}
of_equal = partial(removed, batch=EQUAL, samples=(0,))


@of_equal("where keeps a distance of 0", SINGULAR.format("sqrt"), ".sqrt()", never=("`where`",))
def contrasted(self, x, other):
    distance = (self.body(x) - self.body(other)).square().sum(-1).sqrt()
    return torch.where(distance < 5, distance, torch.full_like(distance, 5.0))


@of_equal("a clamp that does not bind", SINGULAR.format("pow"), "gap**0.5", never=("`clamp`",))
def bounded(self, x, other):
    gap = (self.body(x) - self.body(other)).abs()
    return (gap**0.5).clamp(max=10.0)


# NaN that is only compared is healthy.


@step("raises", "healthy", {"x": normal(4, 3)})
def checked(self, x):
    distance = torch.log(x - 9.0)
    if (distance > 50).any():
        raise ValueError("too far")
    return self.body(x)


# Derivatives that the forward or the loss takes itself: the singular op is that of the function, not the call of grad.


@of_equal("forces", SINGULAR.format("sqrt"), ".sqrt()")
def forces(self, x, other):
    x = x.detach().requires_grad_()
    distance = (x - other).square().sum(-1).sqrt()
    energy = self.body(x).sum() + torch.exp(-distance).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


@of_equal("forces of a quotient that is hidden", TRAP.format("div"), "offset / offset.abs()")
def masked_forces(self, x, other):
    x = x.detach().requires_grad_()
    offset = (x - other).sum(-1)
    ratio = torch.where(offset != 0, (1 + offset / offset.abs()).square(), 0.0)
    return torch.autograd.grad(self.body(x).sum() + ratio.sum(), x, create_graph=True)[0]


@of_equal("forces by torch.func", SINGULAR.format("pow"), ".pow(0.5)", loss=None)
def functional_forces(self, x, other):
    def energy(point):
        return self.body(point).sum() + (point - other).abs().pow(0.5).sum()

    return torch.func.grad(energy)(x)


def slope(output, _batch):
    (gradient,) = torch.autograd.grad(output["angle"].sum(), output["x"], create_graph=True)
    return gradient.square().mean()


@of_equal("a slope in the loss", SINGULAR.format("acos"), "torch.acos", loss=slope)
def angle_and_place(self, x, other):
    x = x.detach().requires_grad_()
    cosine = (x * other).sum(-1) / (other * other).sum(-1)
    return {"angle": torch.acos(cosine.clamp(-1, 1)) + self.body(x).sum(-1), "x": x}


# Ops in torch's or a package's own Python: the library's line, and beside it the user's.


@removed("a density without width", LOG, "self.scale.log()", loss=None, called_from="log_prob(x[:, :2])")
def likelihood(self, x, width):
    return torch.distributions.Normal(self.body(x), width, validate_args=False).log_prob(x[:, :2])


def rms():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # takes seconds, for one of all rows

    return LlamaRMSNorm(3, eps=0.0)


def without_weight():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    with torch.no_grad():
        layer.parametrizations.weight.original.zero_()
    return layer


BLANK = {"x": torch.cat([normal(2, 3), torch.zeros(1, 3)])}
CALLED = {"called_from": "self.skip(x)"}
REASON = "because `skip.parametrizations.weight.original` is 0 throughout"
ZERO = {"line": "weight / sigma", "holds": lambda report: REASON in report.headline, **CALLED}
OF_PACKAGE = {"line": "torch.rsqrt", "samples": (2,), **CALLED}


@step("a spectral norm of zeros", DIVISION, {"x": normal(4, 3)}, lambda: {"skip": without_weight()}, **ZERO)
@step("a norm of a package", "numerics * rsqrt division-by-zero", BLANK, lambda: {"skip": rms()}, **OF_PACKAGE)
def skipped(self, x):
    return self.skip(x)


# Where it grew: the steps from an overflow back to the exponent, the weight or the sample that gave most.


def grown(*last, note=""):
    """The last steps, in a report whose every step has a size."""

    def holds(report):
        steps = tuple((step.op, step.place.module) for step in report.growth)
        sizes = all(step.absmax_out for step in report.growth)
        return steps[-len(last) :] == last and sizes and note in " ".join(report.notes)

    return holds


def temperature():
    return {**body(), "log_scale": nn.Parameter(torch.tensor(12.0))}


PAIRS = {"x": normal(4, 3), "other": normal(4, 3).flip(0)}
MADE = "`self.log_scale.exp()` makes 162,755 of 12 (`log_scale`)"
LEARNED = {"autocast": True, "holds": grown(("exp", ""), ("weight", "log_scale"), note=MADE), "fix": "verified keep-op"}


@step("a learned temperature", "precision", PAIRS, temperature, **LEARNED)
def similar(self, x, other):
    return self.log_scale.exp() * F.normalize(self.body(x)) @ F.normalize(self.body(other)).t()


def large():
    return {"wide": scaled(nn.Linear(3, 6), 1e5)}


WEIGHT = {"autocast": True, "holds": grown(("weight", "wide.weight"))}


@step("a weight of 400,000", "precision", {"x": normal(4, 3)}, large, **WEIGHT)
def loud_weight(self, x):
    return self.wide(x).abs() @ self.wide.weight.new_full((6, 2), 2.0)


def between_extremes(output, _batch):
    low, high = output.float().aminmax(dim=1, keepdim=True)
    return ((output.float() - low) / (high - low + 1e-8) - 1).square().sum()


def divided(report):
    return report.growth[0].op == "to" and "Where the gradient grew: that of `(output.float()" in " ".join(report.notes)


@step(
    "a gradient over 1e-8",
    "precision <loss> to gradient-overflow",
    {"x": torch.cat([normal(3, 3), torch.zeros(1, 3)])},
    lambda: {"body": nn.Linear(3, 2, bias=False)},
    autocast=True,
    loss=between_extremes,
    holds=divided,
)
def compared(self, x):
    return self.body(x)
