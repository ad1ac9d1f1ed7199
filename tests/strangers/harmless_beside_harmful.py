"""Two operations make NaN or Inf, and the step fails by one of them: nothing is left of what the other made."""

from __future__ import annotations

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
X = normal(4, 8)
LOG, DIVISION = "numerics . log log-of-zero", "numerics . div division-by-zero"


class Lifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(8, 4)

    def forward(self, x):
        return torch.sigmoid(self.lift(x))


COUNTS = {"x": X, "count": torch.tensor([2.0, 0.0, 3.0, 1.0])}


@rows(LOG, {**COUNTS, "power": torch.tensor([1.0, 2.0, 3.0, 0.0])}, line="torch.log(power)", samples=(3,), fix="none")
class RowsThatAreDropped(Lifting):
    def forward(self, x, count, power):
        return (super().forward(x) / count[:, None] + torch.log(power)[:, None])[count > 0]


def of_the_kept(output, batch):
    return output.float()[batch["keep"]].square().mean()


KEPT = {"keep": torch.tensor([True, False, True, True]), "scale": torch.tensor([1.0, 0.0, 2.0, 1.0])}
POWERS = torch.tensor([1.0, 2.0, 1.0, 0.0])


@rows(LOG, {"x": X, **KEPT, "power": POWERS}, line="torch.log(power)", samples=(3,), loss=of_the_kept, fix="none")
class RowsThatTheLossDrops(Lifting):
    def forward(self, x, scale, power):
        return super().forward(x) / scale[:, None] + torch.log(power)[:, None]


def of_the_taken(output, batch):
    return -output.float().gather(1, batch["action"][:, None]).mean()


ALLOWED = torch.ones(4, 4)
ALLOWED[[0, 1, 3], [0, 2, 1]] = 0.0


@rows(
    LOG,
    {"x": X, "allowed": ALLOWED, "action": torch.tensor([1, 2, 0, 2])},
    samples=(1,),
    loss=of_the_taken,
)
class ForbiddenActionOfWhichOneIsTaken(Lifting):
    def forward(self, x, allowed):
        weights = super().forward(x) * allowed
        return torch.log(weights / weights.sum(-1, keepdim=True))


def weighted(output, batch):
    alpha = torch.linspace(1, 0, 10)[batch["time"]]
    ratio = alpha / (1 - alpha)
    weight = torch.minimum(ratio, torch.tensor(5.0)) / ratio
    return (weight[:, None] * output.float().square()).mean()


TIMES = {"x": X, "time": torch.tensor([2, 9, 5, 0])}


@rows("numerics <loss> div division-by-zero", TIMES, line="/ ratio", samples=(1,), loss=weighted, fix="verified guard")
@rows("healthy", {**TIMES, "time": torch.tensor([2, 3, 5, 0])}, loss=weighted, name="an infinite ratio alone")
class InfinityThatADivisionEnds(Lifting):
    pass


def of_the_finite(output, _batch):
    scores, squares = output
    return squares.sqrt().mean() - scores[torch.isfinite(scores)].float().mean()


@rows(
    "numerics <loss> sqrt gradient-singularity",
    {"x": torch.cat([X[:3], torch.zeros(1, 8)]), "allowed": ALLOWED / 2},
    line="squares.sqrt()",
    samples=(3,),
    loss=of_the_finite,
    fix="verified clamp",
)
class InfinitiesThatTheLossLeavesOut(Lifting):
    def forward(self, x, allowed):
        return super().forward(x) + torch.log(allowed), (x @ self.lift.weight.T).square().sum(1)


BANNED = torch.zeros(4, 4, dtype=torch.bool)
BANNED[:, 1] = True


@rows(DIVISION, {"x": X, "banned": BANNED, "length": torch.tensor([3.0, 2.0, 1.0, 0.0])}, line="/ length", samples=(3,))
class NewInfinitiesBesideThoseOfAMask(Lifting):
    def forward(self, x, banned, length):
        scores = super().forward(x).log().masked_fill(banned, float("-inf"))
        return (scores / length[:, None]).topk(2, -1).values


@rows(
    DIVISION,
    {"x": X, "count": COUNTS["count"], "size": torch.tensor([1.0, 2.0, 3.0, 0.0])},
    line="/ size",
    samples=(3,),
)
class NewNanBesideThatOfRowsThatAreDropped(Lifting):
    def forward(self, x, count, size):
        mean = super().forward(x) * count[:, None] / count[:, None]
        return ((mean - mean) / size[:, None])[count > 0]


def loud_and_silent(factor):
    """Rows of which the first is so many times as large, and the third is 0."""
    return {"x": X * torch.tensor([[factor], [1.0], [0.0], [1.0]])}


BESIDE = {"samples": (2,), "also": ("elementwise-overflow",)}


@rows("precision . div eps-underflow", loud_and_silent(700.0), 1e-8, line="/ ((h * h).mean", **BESIDE)
@rows(DIVISION, loud_and_silent(1e20), 0.0, line="/ ((h * h).mean", **BESIDE, name="in fp32", amp_dtype="none")
class OverflowThatADivisionEnds(nn.Module):
    """The norm of the first row overflows, which leaves 0 of it; only the third row is NaN."""

    def __init__(self, eps):
        super().__init__()
        self.lift, self.eps = nn.Linear(8, 8, bias=False), eps

    def forward(self, x):
        h = self.lift(x)
        return h / ((h * h).mean(-1, keepdim=True) + self.eps).sqrt()
