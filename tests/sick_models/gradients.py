"""Forward passes without a fault whose gradients are infinite in every precision: singular points and where traps.

In: nothing. Out: `CASES` of the rows "gradient singularity" and "where trap".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, biased, case, rand, randn, scaled, seeded


class Signatures(nn.Module):
    """Two signatures [batch, 1, 8, 8] -> their distance, by the same tower; a pair can be the same picture twice."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))
        self.eps = eps

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        difference = self.tower(left) - self.tower(right)
        return torch.sqrt(difference.square().sum(dim=-1) + self.eps)


def contrastive(output: Tensor, batch: Batch) -> Tensor:
    return torch.where(batch["same"], output.square(), F.relu(1 - output).square()).mean()


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


class PairDistances(nn.Module):
    """Distances between all atoms; the diagonal is zero and hidden by a where."""

    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self.guarded = guarded

    def forward(self, places: Tensor) -> Tensor:
        squared = (places[:, None] - places[None]).square().sum(dim=-1)
        apart = squared > 0
        safe = torch.where(apart, squared, 1.0) if self.guarded else squared
        return torch.where(apart, torch.sqrt(safe), 0.0)


class ForceField(nn.Module):
    """Atoms {"atoms": [n, 5]} -> {"energy"}, from distances in a learned space."""

    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self.place = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
        self.distances = PairDistances(guarded=guarded)
        self.radial = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, inputs: Batch) -> Batch:
        distances = self.distances(self.place(inputs["atoms"]))
        return {"energy": self.radial(distances.unsqueeze(-1)).mean()}


def squared_energy(output: Batch, _batch: Batch) -> Tensor:
    return output["energy"].float().square()


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


def signatures(*, same_picture: bool) -> Batch:
    left, right = randn(3, 1, 8, 8), randn(3, 1, 8, 8, seed=1)
    if same_picture:
        right[1] = left[1]
    return {"left": left, "right": right, "same": torch.tensor([False, True, True])}


CASES = (
    case(
        "singularity/same-signature",
        seeded(Signatures, eps=0.0),
        lambda: signatures(same_picture=True),
        "numerics . sqrt gradient-singularity",
        loss=contrastive,
        line="torch.sqrt(difference.square().sum(dim=-1) + self.eps)",
        repair={"build": seeded(Signatures, eps=1e-6)},
    ),
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
        "where/pair-distances",
        seeded(ForceField, guarded=False),
        lambda: {"atoms": randn(6, 5)},
        "numerics distances sqrt where-gradient-trap",
        loss=squared_energy,
        line="torch.where(apart, torch.sqrt(safe), 0.0)",
        repair={"build": seeded(ForceField, guarded=True)},
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
