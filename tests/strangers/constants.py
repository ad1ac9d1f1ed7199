"""Small constants count by what they guard, whatever they are called, wherever they are kept, or beside one."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import Lifted, normal

rows = Rows()
SMALL = 1e-12


@dataclasses.dataclass
class Config:
    stability: float = 1e-12


class Base(nn.Module):
    floor = 1e-12

    def __init__(self):
        super().__init__()
        self.entry, self.tol, self.config = nn.Linear(8, 8), 1e-12, Config()

    def forward(self, x):
        h = self.entry(x) * 0
        return self.guard(h)


GUARDS = {
    "inherited": lambda self, h: h / (h + self.floor),
    "attribute": lambda self, h: torch.log(h.half().clamp(min=self.tol)),
    "dataclass": lambda self, h: h / torch.sqrt(h.half() + self.config.stability),
    "global": lambda self, h: h * torch.rsqrt(h.half() + SMALL).to(h.dtype),
    "default": lambda self, h, small=1e-12: (h.abs() + small) ** -0.5,
    "filled": lambda self, h: 1 / torch.where(h == 0, torch.full_like(h, SMALL), h),
}
NARROWED = {
    "a tensor of its format": lambda self, h: h / (h + torch.tensor(SMALL, dtype=h.dtype)),
    "beside a norm in fp32": lambda self, h: h / (h.norm() + torch.tensor(SMALL, dtype=h.dtype)),
    "one like another": lambda self, h: h / torch.maximum(h, h.new_tensor([SMALL])),
    "beside one": lambda self, h: torch.log(1 - torch.minimum(h + 2, h.new_tensor(1 - 1e-5))),
}
COMPUTED = {
    "a zero as written": lambda self, h: h / (h + torch.tensor(0.0, dtype=h.dtype)),
    "a sum that rounds to zero": lambda self, h: h / (h + (self.entry.bias * 1e-8).half().square().sum().half()),
}
BATCH = {"x": normal(4, 8)}
SICK = "precision * * eps-underflow"


def net(guard):
    return type("Net", (Base,), {"guard": guard})()


def audited(report):
    return [(use.value, use.effect) for use in report.eps_audit] == [(1e-12, "zero")]


def evidence(value, report):
    return report.cause.evidence[0].value == pytest.approx(value)


for name, guard in GUARDS.items():
    rows(SICK, BATCH, guard, name=name, holds=audited)(net)
for name, guard in NARROWED.items():
    rows(SICK, BATCH, guard, name=name, holds=partial(evidence, 1e-5 if name == "beside one" else SMALL))(net)
for name, guard in COMPUTED.items():
    rows("* * * division-by-zero", BATCH, guard, name=name)(net)


# --- an eps that Python folds into the number one before torch sees it


def names(op):
    return lambda report: f"used by {op} in fp16" in report.cause.evidence[0].text


@rows("precision . log eps-underflow", BATCH, lambda p: 1 - p * (1 - 1e-5), name="mul", holds=names("mul"))
@rows("precision . log eps-underflow", BATCH, lambda p: (1 + 1e-5) - p, name="rsub", holds=names("rsub"))
@rows("healthy", BATCH, lambda p: 1 - p * (1 - 1e-2), name="mul that fp16 keeps")
@rows("healthy", BATCH, lambda p: (1 + 1e-2) - p, name="rsub that fp16 keeps")
def logarithm_of_the_rest(rest):
    """The logarithm of what a saturated probability leaves, kept off zero by a factor or a term beside one."""
    return Lifted(lambda h, x: torch.log(rest(torch.sigmoid(h.abs() * 20))))


@rows.applied("healthy", BATCH, holds=lambda report: report.eps_audit == ())
def factor_that_guards_nothing(x):
    return x * 0.9999


BOUNDED = {
    "logarithm": ("1e-8 is lost beside 1", lambda p: torch.log(1 - p.clamp(1e-8, 1 - 1e-8))),
    "arc": ("1e-10 is lost beside 1", lambda p: torch.atanh(p.clamp(-1 + 1e-10, 1 - 1e-10))),
    "derivative": ("1e-8 is lost beside 1", lambda p: torch.acos(p.clamp(max=1 - 1e-8))),
    "zero itself": ("1e-50 rounds to 0", lambda p: torch.log((p - 1).abs() + 1e-50)),
}


class Bounded(nn.Module):
    """An eps that fp32 loses as well."""

    def __init__(self, function):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))
        self.function = function

    def forward(self, x):
        return self.function(x + self.shift)


for name, (said, function) in BOUNDED.items():
    rows(
        "numerics * * eps-underflow",
        {"x": torch.tensor([[0.5, 1.0], [0.2, 0.1]])},
        function,
        name=name,
        holds=lambda report, said=said: report.headline.startswith(said) and "in fp32" in report.headline,
        amp_dtype="bfloat16",
        loss=lambda output, _: output.sum(),
    )(Bounded)


@rows.applied("numerics . log log-of-zero", {"x": torch.tensor([[0.0, 1.0]])})
def zero_that_another_eps_guards(x):
    return torch.log(1 - x.clamp(max=1.0)) + torch.log(x + 1e-8)
