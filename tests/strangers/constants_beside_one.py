"""An eps that Python folds into the number one before torch sees it."""

import pytest
import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import Lifted, normal

rows = Rows()
BATCH = {"x": normal(4, 8)}


def audit_sees(op):
    def holds(report):
        (use,) = [use for use in report.eps_audit if use.op == op]
        assert (use.value, use.rounded, use.effect) == (pytest.approx(1e-5), 0.0, "zero")
        assert f"used by {op} in fp16" in report.cause.evidence[0].text
        return use.name == ("1 - other" if op == "mul" else "other - 1")

    return holds


@rows("precision . log eps-underflow", BATCH, lambda p: 1 - p * (1 - 1e-5), name="mul", holds=audit_sees("mul"))
@rows("precision . log eps-underflow", BATCH, lambda p: (1 + 1e-5) - p, name="rsub", holds=audit_sees("rsub"))
@rows("healthy", BATCH, lambda p: 1 - p * (1 - 1e-2), name="mul that fp16 keeps")
@rows("healthy", BATCH, lambda p: (1 + 1e-2) - p, name="rsub that fp16 keeps")
def evidence(rest):
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
