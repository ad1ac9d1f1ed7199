"""Operands that are rounded onto a singular point, singular and not the first, not read at all, or whole numbers."""

import math

import torch
from torch import nn
from torch.distributions import Gamma
from torch.nn.functional import gaussian_nll_loss, poisson_nll_loss, softplus

from strangers.rows import Rows
from strangers.visits import Lifted, mean, normal

rows = Rows()
WIDE, BATCH = {"x": normal(4, 16)}, {"x": normal(4, 8)}
ACOS, ONE = "precision . acos gradient-singularity", ("exactly 1",)


@rows(ACOS, WIDE, torch.acos, 0.01, name="fp16", says=ONE, loss=mean, amp_dtype="float16")
@rows(ACOS, WIDE, torch.acos, 0.01, name="bf16", says=ONE, loss=mean, amp_dtype="bfloat16")
@rows("precision . atanh invalid-domain", WIDE, torch.atanh, 0.01, says=("rounding to fp16",), loss=mean)
@rows("healthy", WIDE, torch.atanh, 0.8, loss=mean)
class Angle(nn.Module):
    """The angle between two vectors, their cosine from a product that autocast runs in low precision."""

    def __init__(self, function, apart):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.function = function
        self.apart = apart

    def forward(self, x):
        one = nn.functional.normalize(self.layer(x).float(), dim=-1)
        other = nn.functional.normalize(one + self.apart * one.roll(1, -1), dim=-1)
        cosine = torch.bmm(one[:, None], other[:, :, None]).flatten()
        return self.function(cosine.float())


@rows.lifted("precision . acos invalid-domain", {"x": normal(40, 8)}, fix="verified *")
def angle_with_itself(h, x):
    """A margin that is enough for the rounding of fp32 is not for that of fp16."""
    unit = h / h.norm(dim=-1, keepdim=True).to(h.dtype)
    return torch.acos(unit @ unit.mT * 0.9999)


def tells_of_no_zero(report):
    return not any("zero" in item.text for item in report.cause.evidence)


@rows("precision . log1p log-of-zero", BATCH, 10.0, says=("exactly -1",), holds=tells_of_no_zero)
def saturated(gain):
    return Lifted(lambda h, x: torch.log1p(-torch.sigmoid(h.abs() * gain)))


@rows("* * * input-cast-overflow", WIDE, says=("The line casts `(spread + 30.0).exp()` to fp16",))
class Sampled(nn.Module):
    """Casts a standard deviation, which it computes in fp32, back to the format of the mean."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, x):
        mean, spread = self.layer(x).chunk(2, -1)
        return mean + (spread + 30.0).exp().to(mean.dtype)


# --- losses and densities that are singular in another operand than the first: it is named, and the sample with it


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


# --- products with beta=0 do not read what they are added to: memory as it lies there is no evidence


QUERIES = {"x": normal(2, 5, 16)}


def names_its_operand(report):
    return "absmax_batch1" in {item.name for item in report.cause.evidence}


@rows("healthy", QUERIES, 1.0, 0)
@rows("precision . baddbmm matmul-overflow", QUERIES, 1e3, 0, also=(), holds=names_its_operand)
@rows("numerics", QUERIES, 1.0, 1, holds=lambda report: report.origin.elements.kinds == ("nan",))
class Scores(nn.Module):
    """Attention scores as older code writes them: baddbmm into memory that holds anything."""

    def __init__(self, gain, beta):
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.register_buffer("gain", torch.tensor(gain), persistent=False)
        self.beta = beta

    def forward(self, x):
        query = self.query(x) * self.gain
        memory = torch.full((len(x), x.shape[1], x.shape[1]), math.nan, dtype=query.dtype)
        scores = torch.baddbmm(memory, query, query.mT, beta=self.beta)
        return scores.softmax(-1) @ x


SHAPES = {"addmm": [(3, 4), (4, 3)], "addmv": [(3, 4), (4,)], "addr": [(3,), (3,)], "addbmm": [(2, 3, 4), (2, 4, 3)]}


class Product(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        factors = [x.mean() * torch.ones(shape) for shape in SHAPES[self.name]]
        memory = torch.full((3,) if self.name == "addmv" else (3, 3), math.nan)
        return getattr(torch, self.name)(memory.to(torch.float16), *factors, beta=0)


for name in SHAPES:
    rows("healthy", {"x": normal(2, 5)}, name)(Product)


# --- whole numbers: counts below the line, positions and times that are too large, results that an op writes to


DIVISION = "numerics . div division-by-zero"

rows.lifted(DIVISION, BATCH, name="sum over no element")(lambda h, x: h.sum() / (x > 100).sum())
rows.lifted(DIVISION, BATCH, name="count from Python")(lambda h, x: h.sum(0) / (len(x) - 4))
rows.lifted(DIVISION, BATCH, name="count as a tensor")(lambda h, x: h.sum(0) / torch.tensor([len(x) - 4]))
rows.lifted("healthy", BATCH, name="count of at least one")(lambda h, x: h.sum() / (x > 100).sum().clamp(min=1))


@rows.lifted("numerics . rsqrt division-by-zero", BATCH)
def root_of_no_element(h, x):
    return h * torch.rsqrt((x > 100).sum(0))


@rows.lifted("numerics . log log-of-zero", BATCH)
def log_of_no_element(h, x):
    return h + torch.log((x > 100).sum(0))


@rows("precision . to input-cast-overflow", {"ids": torch.tensor([[70000, 2], [3, 4], [5, 6]])}, samples=(0,))
class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, ids):
        return ids.half() * self.gain


@rows.lifted("precision . mul elementwise-overflow", BATCH, line="torch.mul(h, 3e6, out=scratch)")
def memory_that_an_op_is_told_to_write_to(h, x):
    scratch = torch.full_like(h, float("nan"))
    torch.mul(h, 3e6, out=scratch)
    return scratch
