"""Small constants count by what they guard, whatever they are called and wherever they are kept."""

import dataclasses
import enum
import types
from functools import partial

import pytest
import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
SMALL = 1e-12


@dataclasses.dataclass
class Config:
    stability: float = 1e-12


class Tiny(enum.Enum):
    VALUE = 1e-12


class Base(nn.Module):
    floor = 1e-12

    def __init__(self):
        super().__init__()
        self.entry, self.tol, self.config = nn.Linear(8, 8), 1e-12, Config()
        self.options = types.SimpleNamespace(inner={"z": 1e-12})

    def forward(self, x):
        h = self.entry(x) * 0
        return self.guard(h)


GUARDS = {
    "inherited": lambda self, h: h / (h + self.floor),
    "attribute": lambda self, h: torch.log(h.half().clamp(min=self.tol)),
    "dataclass": lambda self, h: h / torch.sqrt(h.half() + self.config.stability),
    "global": lambda self, h: h * torch.rsqrt(h.half() + SMALL).to(h.dtype),
    "default": lambda self, h, small=1e-12: (h.abs() + small) ** -0.5,
    "enum": lambda self, h: h / (h + Tiny.VALUE.value),
    "nested": lambda self, h: h / h.abs().add(self.options.inner["z"]),
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
OTHERS = {
    "a step": lambda self, h: h + 1e-4,
    "a momentum": lambda self, h: h * 0.9999,
    "a rate": lambda self, h: h - 1e-3 * h.detach(),
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
for name, guard in OTHERS.items():
    rows("healthy", BATCH, guard, name=name, holds=lambda report: report.eps_audit == ())(net)
