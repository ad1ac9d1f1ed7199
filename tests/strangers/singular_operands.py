"""Losses and densities that are singular in another operand than the first: it is named, and the sample with it."""

import torch
from torch import nn
from torch.distributions import Gamma
from torch.nn.functional import gaussian_nll_loss, poisson_nll_loss, softplus

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
X = {"x": normal(4, 8)}
LOUD = {"x": normal(4, 8) * torch.tensor([[1.0], [900.0], [1.0], [1.0]]), "share": torch.full((4, 3), 0.3)}


def with_zeros(name, row):
    return {name: torch.ones(4, 3).index_fill(0, torch.tensor(row), 0.0)}


def difference(name):
    return lambda report: report.difference == f"`{name}` reaches only 0, the others 1 or more"


def density(output, batch):
    return gaussian_nll_loss(output.float(), batch["x"][:, :3], batch["variance"], eps=0.0)


def of_shares(output, batch):
    return -torch.xlogy(batch["share"], output.float().softmax(-1)).sum()


def of_counts(output, batch):
    return poisson_nll_loss(output.float().abs() * batch["exposure"], torch.ones(4, 3), log_input=False, eps=0.0)


def waiting(output, batch):
    return Gamma(softplus(output.float()) + 1.5, torch.ones(4, 3), validate_args=False).log_prob(batch["delay"]).mean()


OUT = {"says": ("`output.float().softmax(-1)` is exactly 0",), "loss": of_shares}
RATE = {"says": ("where input is 0 and target is 1",), "holds": difference("exposure"), "loss": of_counts}


@rows(
    "numerics <loss> log", {**X, **with_zeros("variance", 2)}, samples=(2,), holds=difference("variance"), loss=density
)
@rows("numerics <loss> xlogy log-of-zero", LOUD, name="share of a class that is out", samples=(1,), **OUT)
@rows("numerics <loss> poisson_nll_loss", {**X, **with_zeros("exposure", 3)}, name="rate of 0", samples=(3,), **RATE)
@rows("numerics <loss> xlogy", {**X, **with_zeros("delay", 0)}, name="delay of 0", samples=(0,), loss=waiting)
def linear():
    return nn.Linear(8, 3)
