"""Formulas of bugs whose packages are too large or too old to install, as their threads show them, in other words.

Only the fixes of these are judged (`fixes.py --real-bugs`): what tools say of a formula shows nothing of the package.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sick_models import LOSS
from sick_models.case import Batch, rand, randn, seeded
from torch import Tensor, nn
from torch.distributions import Normal, OneHotCategorical

from real_bugs.bug import Bug


class Policy(nn.Module):
    """Tokens -> the logarithm of each one's probability of being followed by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logarithms [batch, tokens]."""
        scores = torch.log_softmax(self.head(torch.tanh(self.mix(self.embed(tokens)))).float(), -1)
        return scores.gather(-1, tokens.roll(-1, 1).unsqueeze(-1)).squeeze(-1)


def surrogate(output: Tensor, batch: Batch) -> Tensor:
    """The clipped objective of policy optimisation, over the tokens that are no padding."""
    ratio = torch.exp(output - batch["before"])
    gain = batch["gain"][:, None]
    objective = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -(objective * batch["mask"]).sum() / batch["mask"].sum()


def answers(*, padding: float) -> Batch:
    """Three answers, the second with padding of which the old policy had this logarithm."""
    mask = torch.ones(3, 6)
    mask[1, 3:] = 0.0
    before = -2.5 + 0.1 * randn(3, 6)
    before[1, 3:] = padding
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 0, 0, 0], [3, 5, 8, 9, 7, 9]])
    return {"tokens": tokens, "before": before, "mask": mask, "gain": torch.tensor([0.7, -1.1, 0.4])}


class Decaying(nn.Module):
    """Linear attention in which each head forgets at a rate of its own; the gates of a head may be shut."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(8, 24), nn.Linear(8, 2), nn.Linear(8, 8)
        with torch.no_grad():
            self.gate.weight[1] = 0.0
            self.gate.weight[1, 0] = sharpness

    def forward(self, x: Tensor) -> Tensor:
        """Features [batch, tokens, 8]."""
        batch, tokens, _ = x.shape
        query, key, value = self.qkv(x).float().view(batch, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)
        total = F.logsigmoid(self.gate(x).float()).transpose(1, 2).cumsum(-1)
        decay = torch.exp(total[..., :, None] - total[..., None, :])
        scores = (query @ key.transpose(-1, -2)) * decay
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), 0.0)
        mixed: Tensor = self.out((scores @ value).transpose(1, 2).reshape(x.shape))
        return mixed


class Mixture(nn.Module):
    """Weights, means and scales of four normal distributions."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.weight, self.mean, self.scale = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 4)
        self.weight.weight.data.mul_(sharpness)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Three arrays [batch, 4]."""
        return {"weight": self.weight(x).float(), "mean": self.mean(x).float(), "scale": self.scale(x).float()}


def of_mixture(output: Any, batch: Batch) -> Tensor:
    """The negative logarithm of the density."""
    pi = OneHotCategorical(logits=output["weight"])
    normal = Normal(output["mean"], F.elu(output["scale"]) + 1.01)
    density = normal.log_prob(batch["y"].unsqueeze(-1))
    return -torch.logsumexp(torch.log(pi.probs) + density, dim=-1).mean()


def of_durations(output: Tensor, batch: Batch) -> Tensor:
    """The likelihood of durations, of which some are only known to be longer."""
    z = (batch["duration"] - output.float().squeeze(-1)) / 0.25
    density = -0.5 * z**2 - math.log(0.25 * math.sqrt(2 * math.pi))
    survival = 0.5 * (1 + torch.erf(-z / math.sqrt(2)))
    return -torch.where(batch["censored"], torch.log(survival), density).mean()


def durations(*, longest: float) -> Batch:
    """Five durations, of which the last is only known to be longer than this."""
    duration = rand(5)
    duration[4] = longest
    return {"x": randn(5, 3), "duration": duration, "censored": torch.tensor([False, True, False, False, True])}


class Poses(nn.Module):
    """Rotations of cameras as quaternions, one of which may be that of no rotation."""

    def __init__(self, *, still: bool) -> None:
        super().__init__()
        self.rotation = nn.Parameter(randn(3, 4))
        if still:
            self.rotation.data[1] = torch.tensor([1.0, 0.0, 0.0, 0.0])

    def forward(self, points: Tensor) -> Tensor:
        """Points [3, 3], turned a little by each camera."""
        unit = F.normalize(self.rotation, dim=-1)
        vector, scalar = unit[..., 1:], unit[..., :1]
        norm = vector.norm(p=2, dim=-1, keepdim=True).clamp(min=1e-8)
        twist = vector * torch.acos(torch.clamp(scalar, min=-1.0, max=1.0)) / norm
        return points + 2 * torch.linalg.cross(twist, points)


def distance(output: Tensor, _batch: Batch) -> Tensor:
    """The mean square distance from a point."""
    return (output.float() - 0.5).square().mean()


class Neighbours(nn.Module):
    """A softmax over each node's incoming edges."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Linear(4, 1), nn.Linear(4, 2)
        nn.init.ones_(self.score.weight)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Features [nodes, 2]."""
        power = self.score(x[source]).float().exp()
        total = torch.zeros(len(x), 1).index_add(0, target, power)
        share = power / total[target]
        mixed: Tensor = self.out(torch.zeros(len(x), 4).index_add(0, target, share * x[source]))
        return mixed


def nodes(*, far: float) -> Batch:
    """Five nodes in a circle with two more edges; the features of one are this large."""
    x = randn(5, 4)
    x[2] = far
    source, target = torch.tensor([0, 1, 2, 3, 4, 2, 0]), torch.tensor([1, 2, 3, 4, 0, 0, 4])
    return {"x": x, "source": source, "target": target}


BUGS: tuple[Bug, ...] = (
    Bug(
        title="prime-rl: the ratio of padding",
        url="https://github.com/PrimeIntellect-ai/prime-rl/issues/2972",
        model=seeded(Policy),
        inputs=("tokens",),
        batch=partial(answers, padding=-95.0),
        healthy_batch=partial(answers, padding=-2.5),
        loss=surrogate,
        reason="the ratio of padding overflows before the mask multiplies it by 0",
        upstream="the logarithm of the ratio is bounded before the exponential",
        phase="loss",
        module=LOSS,
        op="exp",
        line='ratio = torch.exp(output - batch["before"])',
        cause="exp-overflow",
    ),
    Bug(
        title="flash-linear-attention: decays towards the future",
        url="https://github.com/fla-org/flash-linear-attention/issues/99",
        model=seeded(Decaying, 12.0),
        inputs=("x",),
        batch=lambda: {"x": torch.cat([-torch.ones(2, 10, 1), randn(2, 10, 7)], -1)},
        healthy_model=seeded(Decaying, 0.0),
        loss=distance,
        reason="above the diagonal the exponent is positive, and the mask comes after the product",
        upstream="safe_exp: what is above 0 becomes -inf before the exponential",
        op="exp",
        line="decay = torch.exp(total[..., :, None] - total[..., None, :])",
        cause="exp-overflow",
    ),
    Bug(
        title="mixture-density-network: a component of weight 0",
        url="https://github.com/tonyduan/mixture-density-network/pull/4",
        model=seeded(Mixture, 300.0),
        inputs=("x",),
        batch=lambda: {"x": randn(6, 3), "y": randn(6, seed=1)},
        healthy_model=seeded(Mixture, 1.0),
        loss=of_mixture,
        reason="the weight of a component is rounded to 0, and its logarithm is taken",
        upstream="the logits of the distribution instead of the logarithm of its probabilities",
        phase="loss",
        module=LOSS,
        op="log",
        line="return -torch.logsumexp(torch.log(pi.probs) + density, dim=-1).mean()",
        cause="log-of-zero",
    ),
    Bug(
        title="numpyro: far in the tail of a normal distribution",
        url="https://github.com/pyro-ppl/numpyro/pull/1581",
        model=seeded(partial(nn.Linear, 3, 1)),
        inputs=("x",),
        batch=partial(durations, longest=4.0),
        healthy_batch=partial(durations, longest=0.5),
        loss=of_durations,
        reason="1 + erf is 0 ten standard deviations below, in float64 too",
        upstream="the logarithm of the distribution function by a function of its own",
        phase="loss",
        module=LOSS,
        op="log",
        line='return -torch.where(batch["censored"], torch.log(survival), density).mean()',
        cause="log-of-zero",
    ),
    Bug(
        title="kornia: the quaternion of no rotation",
        url="https://github.com/kornia/kornia/pull/4228",
        model=seeded(partial(Poses, still=True)),
        inputs=("points",),
        batch=lambda: {"points": randn(3, 3, seed=1)},
        healthy_model=seeded(partial(Poses, still=False)),
        loss=distance,
        reason="the derivative of acos is infinite at 1, and the vector that it is multiplied by is 0",
        upstream="an angle by atan2, whose gradient at no rotation is finite",
        phase="backward",
        op="acos",
        line="twist = vector * torch.acos(torch.clamp(scalar, min=-1.0, max=1.0)) / norm",
        cause="gradient-singularity",
    ),
    Bug(
        title="pytorch-geometric: the softmax of a node's edges",
        url="https://github.com/pyg-team/pytorch_geometric/issues/53",
        model=seeded(Neighbours),
        inputs=("x", "source", "target"),
        batch=partial(nodes, far=40.0),
        healthy_batch=partial(nodes, far=1.0),
        loss=distance,
        reason="the exponentials of scores overflow before they are divided by their sum",
        upstream="each node's largest score is subtracted",
        op="exp",
        line="power = self.score(x[source]).float().exp()",
        cause="exp-overflow",
    ),
)
