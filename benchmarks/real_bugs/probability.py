"""Bugs in Bayesian layers, Gaussian processes, Bayesian optimisation, survival times and reinforcement learning."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sick_models import LOSS
from sick_models.case import Batch, randn, seeded
from torch import Tensor, nn

from real_bugs.bug import Bug


class Bayes(nn.Module):
    """A linear layer with a distribution over its weights -> its output, and the log of the weights' prior."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        from blitz.modules import BayesianLinear

        self.layer = BayesianLinear(3, 2, posterior_mu_init=mean)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Output [batch, 2] and a number."""
        return {"out": self.layer(x), "log_prior": self.layer.log_prior}


class DeepKernel(nn.Module):
    """Features of a network, interpolated on a grid that spans them, as a kernel of KISS-GP does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 1)
        self.values = nn.Parameter(torch.linspace(-1, 1, 10)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        """One value for each point [points, 1]."""
        from gpytorch.utils.grid import create_grid
        from gpytorch.utils.interpolation import Interpolation, left_interp

        place = self.embed(x).float()
        low, high = float(place.min()), float(place.max())
        spacing = (high - low) / (10 - 4.02)
        grid = create_grid([10], [(low - 2.01 * spacing, high + 2.01 * spacing)])
        indices, weights = Interpolation().interpolate(grid, place)
        value: Tensor = left_interp(indices, weights, self.values)
        return value


class Acquisition(nn.Module):
    """Log improvements of candidates in samples of the model, -inf where infeasible -> a smooth best of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 1)

    def forward(self, candidates: Tensor, infeasible: Tensor) -> Tensor:
        """The log of the mean over samples [1]."""
        from botorch.utils.safe_math import logmeanexp, smooth_amax

        score = self.score(candidates).squeeze(-1).float() + torch.where(infeasible, -torch.inf, 0.0)
        mean: Tensor = logmeanexp(smooth_amax(score, dim=-1), dim=0)
        return mean


class Actor(nn.Module):
    """A policy for actions between -bound and bound -> an action and the logarithm of its probability."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        import numpy as np
        from all.policies.soft_deterministic import SoftDeterministicPolicyNetwork
        from gym.spaces import Box

        edge = np.full(1, bound, dtype=np.float32)
        self.policy = SoftDeterministicPolicyNetwork(nn.Linear(3, 2), Box(-edge, edge))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [batch, 1] and logarithms [batch]."""
        from all.environments import State

        action, log_probability = self.policy(State(observation))
        return action, log_probability


def hazard_loss(output: Tensor, batch: Batch) -> Tensor:
    """The negative partial likelihood of Cox's model."""
    from pycox.models.loss import cox_ph_loss

    loss: Tensor = cox_ph_loss(output.float(), batch["years"], batch["died"])
    return loss


def negative(output: Any, _batch: Batch) -> Tensor:
    """What an optimizer of acquisition functions minimises."""
    loss: Tensor = -output.float()
    return loss


def candidates(*, infeasible: bool) -> Batch:
    """Four samples of three candidates, which may all be infeasible in the second sample."""
    hidden = torch.zeros(4, 3, dtype=torch.bool)
    hidden[1] = infeasible
    return {"candidates": randn(4, 3, 4), "infeasible": hidden}


def patients(*, all_censored: bool) -> Batch:
    """Four patients, how long each was followed, and whether it died."""
    died = torch.tensor([1.0, 0.0, 1.0, 0.0]) * (not all_censored)
    return {"x": randn(4, 3), "years": torch.tensor([2.0, 5.0, 1.0, 3.0]), "died": died}


BUGS: tuple[Bug, ...] = (
    Bug(
        title="blitz: weights far from their prior",
        url="https://github.com/piEsposito/blitz-bayesian-deep-learning/issues/98",
        packages=("blitz-bayesian-pytorch==0.2.7",),
        model=seeded(Bayes, 3.0),
        inputs=("x",),
        batch=lambda: {"x": torch.ones(4, 3)},
        healthy_model=seeded(Bayes, 0.0),
        reason="the prior's density at 3 underflows to 0, and its logarithm is taken",
        module="layer",
        op="log",
        line="return (torch.log(prior_pdf) - 0.5).sum()",
        cause="log-of-zero",
    ),
    Bug(
        title="gpytorch: a grid of no width",
        url="https://github.com/cornellius-gp/gpytorch/pull/971",
        packages=("gpytorch==0.3.6", "scipy==1.14.1"),
        model=seeded(DeepKernel),
        inputs=("x",),
        batch=lambda: {"x": torch.ones(6, 3)},
        healthy_batch=lambda: {"x": randn(6, 3)},
        reason="the network maps all points on one place, so the spacing of the grid is 0; NaN then becomes an index",
        upstream="the spacing is at least 1e-10",
        op="div",
        line="lower_grid_pt_idxs = torch.floor((x_target[:, i] - x_grid[i][0]) / grid_delta)",
        cause="division-by-zero",
    ),
    Bug(
        title="botorch: a sample without a feasible candidate",
        url="https://github.com/pytorch/botorch/pull/1999",
        packages=(
            "botorch==0.9.2",
            "gpytorch==1.11",
            "linear_operator==0.5.1",
            "pyro-ppl==1.9.1",
            "pyro-api==0.1.2",
            "opt-einsum==3.3.0",
            "jaxtyping==0.2.36",
            "typeguard==2.13.3",
            "multipledispatch==1.0.0",
            "scipy==1.14.1",
        ),
        model=seeded(Acquisition),
        inputs=("candidates", "infeasible"),
        batch=partial(candidates, infeasible=True),
        healthy_batch=partial(candidates, infeasible=False),
        loss=negative,
        reason="the derivative of logsumexp is exp(x - logsumexp(x)), and of -inf alone that is exp(-inf + inf)",
        upstream="a logsumexp of its own, whose derivative at -inf alone is finite",
        phase="backward",
        op="logsumexp",
        line="return torch.logsumexp(X / tau, dim=dim) * tau",
        cause="indeterminate-form",
    ),
    Bug(
        title="pycox: a batch in which nobody died",
        url="https://github.com/havakv/pycox/issues/124",
        packages=(
            "pycox==0.2.3",
            "torchtuples==0.2.2",
            "numba==0.68.1",
            "llvmlite==0.50.0",
            "h5py==3.12.1",
            "scikit-learn==1.7.2",
            "joblib==1.5.2",
            "threadpoolctl==3.6.0",
            "scipy==1.14.1",
            "requests==2.32.3",
            "urllib3==2.2.3",
            "charset-normalizer==3.3.2",
            "certifi==2024.8.30",
        ),
        model=seeded(partial(nn.Linear, 3, 1)),
        inputs=("x",),
        batch=partial(patients, all_censored=True),
        healthy_batch=partial(patients, all_censored=False),
        loss=hazard_loss,
        reason="the likelihood is divided by the number of deaths, which is 0, and so is the likelihood",
        phase="loss",
        module=LOSS,
        op="div",
        line="return - log_h.sub(log_cumsum_h).mul(events).sum().div(events.sum())",
        cause="division-by-zero",
    ),
    Bug(
        title="autonomous-learning-library: actions beyond one",
        url="https://github.com/cpnota/autonomous-learning-library/issues/139",
        packages=(
            "autonomous-learning-library==0.5.1",
            "gym==0.17.3",
            "cloudpickle==3.1.0",
            "tensorboardX==2.6",
            "protobuf==3.20.3",
            "opencv-python-headless==4.10.0.84",
        ),
        model=seeded(Actor, 2.0),
        inputs=("observation",),
        batch=lambda: {"observation": randn(6, 3)},
        healthy_model=seeded(Actor, 1.0),
        reason="the action is scaled past 1 before 1 - action ** 2 is taken, whose logarithm is not real",
        upstream="pull request 140 takes the logarithm before the action is scaled",
        module="policy",
        op="log",
        line="log_prob -= torch.log(1 - action.pow(2) + 1e-6)",
        cause="invalid-domain",
    ),
)
