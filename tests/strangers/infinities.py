"""Infinities of an op beside those of a mask, exact zeros made of one, gradients at one, and those of fp32 alone."""

import math

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import mean, normal

rows = Rows()
BATCH = {"x": torch.tensor([[1.0, 2.0, 3.0], [0.5, 2.0, 1.0]])}


def masked(x):
    return x.masked_fill(torch.tensor([False, False, True]), -math.inf)


@rows.applied("* * sqrt invalid-domain", BATCH)
def below_zero(x):
    return torch.sqrt((x - 2).masked_fill(x > 2, math.inf)).clamp(max=9)


@rows.applied("* * exp exp-overflow", BATCH)
def beyond_float64(x):
    return torch.exp(masked(x) * 400).sum(-1)


@rows.applied("* * div division-by-zero", BATCH)
def divisor_of_zero(x):
    return (masked(x) / (x - x[:1])).softmax(-1)


@rows.applied("* * atanh invalid-domain", BATCH)
def out_of_the_domain(x):
    return masked(x) * torch.atanh(masked(x).exp() / math.e**2)


# --- an exact 0 that was made of an infinity: what made the infinity comes first, if the code did not write it itself


STILL = {"x": normal(4, 8).index_fill(0, torch.tensor(1), 0.0)}
LOGARITHM = "numerics . log log-of-zero"


@rows.lifted(LOGARITHM, STILL, line="noise = torch.log(x.abs())", samples=(1,), also=("division-by-zero",))
def last_step_of_a_scheduler(h, x):
    noise = torch.log(x.abs())
    ratio = 1.0 / (2.0 - noise)
    return h * (1.0 / ratio)


@rows.lifted("precision . mul elementwise-overflow", {"x": 400 * normal(4, 8)}, line="energy = h * h")
def inverse_energy(h, x):
    energy = h * h
    return torch.log(energy.reciprocal())


HUGE = {"x": 1e38 * (1 + normal(4, 8).abs())}


@rows.lifted("numerics . sum reduction-overflow", HUGE, line="keepdim=True")
def shares_of_a_sum_that_overflows(h, x):
    return (x / x.sum(-1, keepdim=True)).log() + h


@rows.lifted("numerics . sum reduction-overflow", HUGE, line="x.sum()")
def shares_of_all_that_overflows(h, x):
    return (x / x.sum()).log() + h


@rows.lifted(LOGARITHM, STILL, line="torch.log(h.float()", loss=mean)
def class_that_the_code_bans(h, x):
    return torch.log(h.float().masked_fill(x > 1, -math.inf).softmax(-1))


# --- ops with a value for infinities and without a derivative: the gradient is an indeterminate form, not infinite


X = normal(3, 2).abs() + 0.5
CLOSED = {"x": X, "closed": torch.tensor([[False, False], [True, True], [False, True]])}
BACKWARD = {"phase": "backward", "inputs": "x,closed", "loss": lambda output, _: output.sum()}


@rows("numerics . logaddexp indeterminate-form", CLOSED, 2, 2, **BACKWARD)
@rows("healthy", {"x": X, "closed": torch.tensor([[False, True]] * 3)}, 2, 2, name="harmless", loss=BACKWARD["loss"])
class Merge(nn.Linear):
    """Log probabilities of two ways, either of which may be closed."""

    def forward(self, x, closed):
        scores = super().forward(x).float() + torch.where(closed, -torch.inf, 0.0)
        return torch.logaddexp(scores[:, 0], scores[:, 1]).exp()


@rows("numerics . mul indeterminate-form", CLOSED, **BACKWARD)
class Reach(nn.Module):
    """How much of what is so far away arrives; nothing from infinitely far."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.ones(2))

    def forward(self, x, closed):
        far = x.masked_fill(closed, torch.inf)
        return torch.exp(-(far * self.rate).float())


@rows("numerics . sqrt gradient-singularity", CLOSED, **BACKWARD)
class Length(Reach):
    """The root of what may be 0, beside an infinity that is no trouble: here the slope is infinite."""

    def forward(self, x, closed):
        squared = ((x * self.rate).float() ** 2).sum(1) * closed.any(1)
        roots = torch.cat([squared, squared.new_full((1,), torch.inf)]).sqrt()
        return roots[:-1]


# --- a step that rounding keeps finite and fp32 does not is no healthy one


ONES = {"x": torch.ones(2, 1)}
BECAUSE = "The step is finite under fp16 autocast but non-finite in fp32, because of {} ("


def no_fix(report):
    return not report.fixes


@rows("cannot-tell", ONES, says=(BECAUSE.format("reciprocal"),), holds=no_fix, amp_dtype="float16")
@rows("numerics . reciprocal division-by-zero", ONES, says=("is not in the file",), name="fp16 is a guess")
@rows("healthy", {"x": torch.full((2, 1), math.pi)}, name="fp32 that rounds as finitely")
class Third(nn.Module):
    """A ratio whose divisor is zero in fp32, and a rounding error of fp16 in fp16."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.scale.weight, 1 / 3)

    def forward(self, x):
        return self.ratio(self.scale(x))

    def ratio(self, third):
        return 1 / (third.float() - 1 / 3)


@rows("numerics . logaddexp where-gradient-trap", {"x": X}, 2, 2, fix="verified clamp", **{**BACKWARD, "inputs": "x"})
class Aligner(nn.Linear):
    """Two steps of a chain that starts in its first state; the last state is not reached, and left out."""

    def forward(self, x):
        stay = nn.functional.logsigmoid(super().forward(x).float())
        reached = nn.functional.pad(stay[:, :1], (0, 2), value=-math.inf)
        moved = nn.functional.pad((reached + 1)[:, :-1], (1, 0), value=-math.inf)
        return torch.logaddexp(reached + stay.repeat(1, 2)[:, :3], moved)[:, 1]
