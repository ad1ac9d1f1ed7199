"""Normalisations at their singular points, losses written by hand, gradients that are meant to be hidden."""

import math
import re

import torch
from tiny_models import Chain, Returns
from torch import nn
from torch.nn.functional import binary_cross_entropy, kl_div, normalize

from strangers.rows import Rows
from strangers.visits import Between, Lifted, mean, normal

rows = Rows()
BATCH, IMAGE = {"x": normal(4, 8)}, {"image": normal(2, 3, 8, 8)}


@rows("healthy", IMAGE, 1.0, 0.0, mode="eval")
@rows("numerics norm batch_norm division-by-zero", IMAGE, 0.0, 0.0, mode="eval")
@rows("numerics norm batch_norm invalid-domain", IMAGE, -1.0, 1e-5, mode="eval")
@rows("state norm - poisoned-buffers", IMAGE, math.nan, 1e-5, mode="eval")
class Pixels(nn.Module):
    def __init__(self, variance, eps):
        super().__init__()
        self.look = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, eps=eps)
        self.norm.running_var.fill_(variance)

    def forward(self, image):
        return self.norm(self.look(image)).relu()


@rows("numerics middle.norm * division-by-zero", BATCH, lambda: nn.LayerNorm(8, eps=0.0), name="layer norm")
@rows("numerics middle.norm * division-by-zero", BATCH, lambda: nn.GroupNorm(2, 8, eps=0.0), name="group norm")
def norm_without_eps_of_something_constant(make):
    return Between(Chain(zero=Returns(lambda x: 0 * x), norm=make()))


POLES = {
    "polygamma": lambda x: torch.polygamma(1, x.float().relu()),
    "special_zeta": lambda x: torch.special.zeta(x.float().sign(), 2.0),
    "digamma": lambda x: torch.digamma(x.float().relu()),
}
for op, function in POLES.items():
    rows.between(f"numerics middle {op} invalid-domain", BATCH, name=f"pole of {op}")(function)


@rows("* middle prod reduction-overflow", {"x": normal(4, 64)})
def product_that_even_float64_cannot_hold():
    likelihood = Returns(lambda x: torch.prod(1e30 * (1 + x.float().abs()), -1, keepdim=True).expand_as(x))
    return Between(likelihood, width=64)


def zeros(function):
    return Lifted(lambda h, x: function((h.float() * torch.tensor([0.0, 1.0] * 4)).abs()))


SAFE_BEFORE = {
    "where twice": lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0),
    "clamp before": lambda x: x.clamp(min=1e-6).log(),
    "normalize": lambda x: normalize(0 * x, dim=-1),
    "cumprod": lambda x: torch.cumprod(x, -1),
}
for name, function in SAFE_BEFORE.items():
    rows("healthy", BATCH, function, name=name, loss=mean)(zeros)


def tells_of_a_hook(report):
    return report.headline.endswith("a hook of that tensor did, or the sum of several gradients")


@rows.lifted("numerics lift", BATCH, phase="backward", holds=tells_of_a_hook, loss=mean)
def hooked(h, x):
    h.register_hook(lambda gradient: gradient * math.inf)
    return h


def tells_of_a_module_hook(report):
    return report.headline == "A backward hook of middle turns finite gradients into non-finite ones"


@rows("numerics * * -", BATCH, holds=tells_of_a_module_hook, loss=mean)
def with_a_backward_hook():
    """Torch runs it in a custom Function of its own, whose line and name say nothing."""
    model = Between(nn.Linear(8, 8))
    model.middle.register_full_backward_hook(lambda module, gradients, _: (torch.log(-gradients[0].abs()),))
    return model


def relu():
    return Between(nn.ReLU())


UNSCALED = ("--loss-scale",)
rows("healthy", BATCH, name="fp16 without a loss scale", says=UNSCALED, loss=mean, amp_dtype="float16")(relu)
rows("healthy", BATCH, name="bf16 without one", never=UNSCALED, loss=mean, amp_dtype="bfloat16")(relu)
rows("healthy", BATCH, name="fp16 with one", never=UNSCALED, loss=mean, amp_dtype="float16", loss_scale=8.0)(relu)


def refused_by_autocast(output, batch):
    return binary_cross_entropy(output.float().sigmoid(), batch["label"])


def taken_back(output, _):
    """The loss is computed in fp32, and its gradient is cast on the way back: in fp32 there is no such cast."""
    return output.float().sum() * 1e5


LABELED = {**BATCH, "label": torch.ones(4, 2)}
SCALED = {"loss": mean, "loss_scale": 1e8}
rows("loss-scale * * loss-scale-overflow", BATCH, name="a loss scale that is too high", **SCALED)(relu)
rows("healthy", LABELED, name="loss that autocast refuses", loss=refused_by_autocast, inputs="x")(relu)
rows("precision <loss> to gradient-overflow", BATCH, name="gradient fp16 cannot take back", loss=taken_back)(relu)


def divergence(output, batch):
    return kl_div(output.float().log_softmax(-1), batch["target"], reduction="batchmean")


SHARES = torch.full((4, 2), 0.5).index_fill(0, torch.tensor(2), -0.1)
rows(
    "numerics <loss> kl_div invalid-domain",
    {**BATCH, "target": SHARES},
    name="a share below 0",
    samples=(2,),
    says=("target is -0.1",),
    holds=lambda report: report.difference == "`target` reaches -0.1, the others stay above 0",
    loss=divergence,
)(relu)


@rows("numerics . log", {"x": normal(1, 8)}, 8, mode=None, says=("In train mode the model does not run",))
class BatchOfOne(nn.BatchNorm1d):
    """Batch norm refuses a single sample in train mode, so it failed in eval mode."""

    def forward(self, x):
        return torch.log(super().forward(x).relu())


def tells_fp32(report):
    return re.search(r"is 0 in 32 elements \(at least [\d.]+e-\d+ in fp32\)$", report.headline)


SMALLEST = "; in fp32 none is, and the smallest is "


@rows.lifted("precision . div division-by-zero", BATCH, says=(SMALLEST,), holds=tells_fp32)
def divisor_that_fp16_rounds_to_zero(h, x):
    return x / torch.sigmoid(h - 20)
