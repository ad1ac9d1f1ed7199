"""Forward passes without a fault whose gradients are infinite in every precision: a singular point and a where trap.

In: nothing. Out: `CASES` of the rows "gradient singularity" and "where trap".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, biased, case, rand, randn, scaled, seeded


class PoseHead(nn.Module):
    """Points [batch, n, 3] -> a rotation [batch, 3, 3] near the identity."""

    def __init__(self, spin: float) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(3, 16), nn.ReLU())
        self.twist = biased(scaled(nn.Linear(16, 3), spin), spin)

    def forward(self, points: Tensor) -> Tensor:
        x, y, z = self.twist(self.encode(points).amax(dim=1)).float().unbind(dim=-1)
        zero = torch.zeros_like(x)
        generator = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1)
        return torch.matrix_exp(generator.view(-1, 3, 3))


def geodesic(output: Tensor, _batch: Batch) -> Tensor:
    """The angle of the rotation: exactly zero for a head that was initialised with zeros."""
    trace = output.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return torch.acos((trace - 1) / 2).mean()


class ClickRate(nn.Module):
    """Clicks over views from two heads of a table [batch, 6]; the rate is hidden where there were no views."""

    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self.clicks = nn.Linear(6, 3)
        self.views = biased(nn.Linear(6, 3), -20.0, unit=1)
        self.guarded = guarded

    def forward(self, table: Tensor) -> Tensor:
        clicks, views = F.relu(self.clicks(table)), F.relu(self.views(table))
        divisor = torch.where(views > 0, views, 1.0) if self.guarded else views
        return torch.where(views > 0, clicks / divisor, 0.0)


def error_of_the_rate(output: Tensor, batch: Batch) -> Tensor:
    return F.l1_loss(output, batch["rate"])


CASES = (
    case(
        "singularity/identity-rotation",
        seeded(PoseHead, spin=0.0),
        lambda: {"points": randn(2, 9, 3)},
        "numerics <loss> acos gradient-singularity",
        loss=geodesic,
        line="torch.acos((trace - 1) / 2).mean()",
        repair={"build": seeded(PoseHead, spin=0.5)},
    ),
    case(
        "where/click-rate",
        seeded(ClickRate, guarded=False),
        lambda: {"table": randn(5, 6), "rate": rand(5, 3)},
        "numerics . div where-gradient-trap",
        loss=error_of_the_rate,
        line="torch.where(views > 0, clicks / divisor, 0.0)",
        repair={"build": seeded(ClickRate, guarded=True)},
    ),
)
