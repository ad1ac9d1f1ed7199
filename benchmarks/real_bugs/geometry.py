"""Bugs in what computes with manifolds, points in space and differential equations."""

from __future__ import annotations

from functools import partial

import torch
from sick_models.case import Batch, randn, seeded
from torch import Tensor, nn

from real_bugs.bug import Bug
from real_bugs.parts import Gain, mean


class Tangent(Gain):
    """Symmetric matrices, stretched by a learned factor -> their lengths as tangents of a manifold."""

    def forward(self, tangent: Tensor) -> Tensor:
        """Lengths [batch]."""
        from geoopt import SymmetricPositiveDefinite

        point = torch.eye(2).expand(len(tangent), 2, 2)
        length: Tensor = SymmetricPositiveDefinite().norm(point, super().forward(tangent))
        return length


class Molecule(nn.Module):
    """Atoms in space -> equivariant features of each from those within reach."""

    def __init__(self) -> None:
        super().__init__()
        from se3_transformer_pytorch import SE3Transformer

        self.convolve = SE3Transformer(
            dim=4, depth=0, num_degrees=2, heads=1, dim_head=4, num_neighbors=3, valid_radius=5.0
        )

    def forward(self, atoms: Tensor, places: Tensor) -> Tensor:
        """Features [batch, atoms, 4] that do not turn with the molecule."""
        features: Tensor = self.convolve(atoms, places, torch.ones(atoms.shape[:2], dtype=torch.bool), return_type=0)
        return features


class Motion(nn.Module):
    """A state that moves, integrated together with what the way costs so far, at a price for each unit of time."""

    def __init__(self) -> None:
        super().__init__()
        self.force = nn.Linear(2, 2)

    def forward(self, state: Tensor, price: Tensor) -> Tensor:
        """The state at time 1."""
        from torchdiffeq import odeint

        def move(_time: Tensor, now: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return price, torch.tanh(self.force(now[1])).float()

        result: Tensor = odeint(move, (torch.zeros_like(price), state), torch.tensor([0.0, 1.0]))[1][-1]
        return result


def tangents(*, zero: bool) -> Batch:
    """Symmetric matrices, the second one perhaps zero."""
    tangent = torch.tensor([[[1.0, 0.5], [0.5, 2.0]], [[0.5, 0.0], [0.0, 1.0]]])
    tangent[1] *= not zero
    return {"tangent": tangent}


def atoms(*, stray: bool) -> Batch:
    """Five atoms, the last of which may be out of reach of the others."""
    places = randn(1, 5, 3)
    places[0, 4] += 50.0 * stray
    return {"atoms": randn(1, 5, 4, seed=1), "places": places}


BUGS: tuple[Bug, ...] = (
    Bug(
        title="torchdiffeq: a state that stays at zero",
        url="https://github.com/rtqichen/torchdiffeq/issues/38",
        packages=("torchdiffeq==0.0.1",),
        model=Motion,
        inputs=("state", "price"),
        batch=lambda: {"state": torch.ones(3, 2), "price": torch.zeros(3, 1)},
        healthy_batch=lambda: {"state": torch.ones(3, 2), "price": torch.ones(3, 1)},
        reason="size and slope of the cost are both 0, and the first step is their quotient",
        upstream="the first step is 1e-6 where the size or the slope is below 1e-5",
        op="div",
        line="h0 = 0.01 * max(d0_ / d1_ for d0_, d1_ in zip(d0, d1))",
        cause="division-by-zero",
    ),
    Bug(
        title="geoopt: the length of a zero tangent",
        url="https://github.com/geoopt/geoopt/issues/243",
        packages=("geoopt==0.5.1", "scipy==1.14.1"),
        model=Tangent,
        inputs=("tangent",),
        batch=partial(tangents, zero=True),
        healthy_batch=partial(tangents, zero=False),
        loss=mean,
        reason="the derivative of the root of an inner product is infinite at 0",
        upstream="pull request 245 gives the norm of this manifold a finite gradient at 0",
        phase="backward",
        op="pow",
        line="return self.inner(x, u, keepdim=keepdim) ** 0.5",
        cause="gradient-singularity",
    ),
    Bug(
        title="se3-transformer: an atom without neighbours",
        url="https://github.com/lucidrains/se3-transformer-pytorch/commit/281171583bf5dea77e52d99f58868cf1d901264a",
        packages=("se3-transformer-pytorch==0.0.22", "einops==0.8.0"),
        model=seeded(Molecule),
        inputs=("atoms", "places"),
        batch=partial(atoms, stray=True),
        healthy_batch=partial(atoms, stray=False),
        reason="all neighbours of the stray atom are masked: their sum 0 is divided by their number 0",
        upstream="the number is at least 1, and the mean of nothing is 0",
        module="convolve.conv_in",
        op="div",
        line="return tensor.sum(dim = dim) / mask.sum(dim = dim)",
        cause="division-by-zero",
    ),
)
