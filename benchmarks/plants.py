"""Formulas that fail in one sample of a random program, each beside another that gives its value exactly, or its limit.

In: nothing. Out: `PLANTS`, with which `random_fixes.py` writes its programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A formula that fails in one sample: its lines, and `right`, the lines of its exact value or limit.

    The lines compute `h` from `h` and `s` in the forward, or return their loss (`in_loss`). `prepare` spoils a sample.
    Without `right` the program is wrong, and no fix is right. `is_free`: the sample has no value.
    `is_beyond`: the value is past fp32's range, so that only the gradient is judged. `op` fails first, and `at` is a
    part of its line; `guilty`: in the sample that
    `prepare` spoils, in all, or in those that the weights decide; such a program may be healthy.
    """

    name: str
    lines: str
    right: str | None
    prepare: Callable[[dict[str, torch.Tensor], int], None]
    op: str
    at: str
    guilty: Literal["one", "all", "unknown"] = "one"
    in_loss: bool = False
    is_free: bool = False
    is_beyond: bool = False


def _zero(batch: dict[str, torch.Tensor], sample: int) -> None:
    batch["s"][sample] = 0.0


def _huge(batch: dict[str, torch.Tensor], sample: int) -> None:
    batch["s"][sample] = 1e25


def _large(batch: dict[str, torch.Tensor], sample: int) -> None:
    batch["s"][sample] = batch["s"][sample] + 120.0


PLANTS = (
    Plant(
        name="logsumexp",
        lines="h = h + torch.log(torch.exp(s).sum(-1, keepdim=True))",
        right="h = h + torch.logsumexp(s, -1, keepdim=True)",
        prepare=_large,
        op="exp",
        at="torch.exp(s)",
    ),
    Plant(
        name="softplus",
        lines="h = h + torch.log(1 + torch.exp(s))",
        right="h = h + F.softplus(s)",
        op="exp",
        at="torch.exp(s)",
        prepare=_large,
    ),
    Plant(
        name="softmax",
        lines="e = torch.exp(s)\nh = h * (e / e.sum(-1, keepdim=True))",
        right="h = h * torch.softmax(s, -1)",
        prepare=_large,
        op="exp",
        at="torch.exp(s)",
    ),
    Plant(
        name="clipped-ratio",
        lines="h = h * (torch.clamp(s, max=0.4) / s)",
        right="h = h * torch.where(s > 0.4, 0.4 / s, 1.0)",
        prepare=_zero,
        op="div",
        at="/ s",
    ),
    Plant(
        name="sine-over-angle",
        lines="h = h * (torch.sin(s) / s)",
        right="h = h * torch.where(s == 0, 1.0, torch.sin(s) / torch.where(s == 0, 1.0, s))",
        prepare=_zero,
        op="div",
        at="/ s",
    ),
    Plant(
        name="growth-over-time",
        lines="h = h + (torch.exp(s) - 1) / s",
        right="h = h + torch.where(s == 0, 1.0, torch.expm1(s) / torch.where(s == 0, 1.0, s))",
        prepare=_zero,
        op="div",
        at="/ s",
    ),
    Plant(
        name="entropy",
        lines="h = h - s * torch.log(s)",
        right="h = h - torch.xlogy(s, s)",
        prepare=_zero,
        op="log",
        at="torch.log(s)",
    ),
    Plant(
        name="shift-before-norm",
        lines="h = F.layer_norm(h + (1 / s).mean(-1, keepdim=True), h.shape[-1:])",
        right="h = F.layer_norm(h, h.shape[-1:])",
        prepare=_zero,
        op="reciprocal",
        at="1 / s",
    ),
    Plant(
        name="dose-behind-relu",
        lines="k = (s.abs() - 0.01).relu()\nh = h * ((1 - torch.exp(-k * (1 + h.sigmoid()))) / k)",
        right="k = (s.abs() - 0.01).relu()\nt = 1 + h.sigmoid()\n"
        "h = h * torch.where(k == 0, t, -torch.expm1(-k * t) / torch.where(k == 0, 1.0, k))",
        prepare=_zero,
        op="div",
        at="/ k",
        guilty="unknown",
    ),
    Plant(
        name="squashed-action",
        lines="h = h - torch.log(1 - torch.tanh(s) ** 2)",
        right="h = h - 2 * (math.log(2) - s - F.softplus(-2 * s))",
        prepare=_large,
        op="log",
        at="torch.log(",
    ),
    Plant(
        name="log-cosh",
        lines="h = h + torch.log(torch.cosh(s))",
        right="h = h + s.abs() + F.softplus(-2 * s.abs()) - math.log(2)",
        prepare=_large,
        op="cosh",
        at="torch.cosh(",
    ),
    Plant(
        name="inverse-softplus",
        lines="w = s.abs() + 0.5\nh = h + torch.log(torch.exp(w) - 1)",
        right="w = s.abs() + 0.5\nh = h + w + torch.log(-torch.expm1(-w))",
        prepare=_large,
        op="exp",
        at="torch.exp(w)",
    ),
    Plant(
        name="rows-over-norm",
        lines="h = h * (s / s.norm(dim=-1, keepdim=True))",
        right="h = h * (s / s.norm(dim=-1, keepdim=True).clamp(min=1e-30))",
        prepare=_zero,
        op="div",
        at="s.norm(",
        is_free=True,
    ),
    Plant(
        name="masked-mean",
        lines="m = s.gt(0).to(h)\nh = h * ((h * m).sum(-1, keepdim=True) / m.sum(-1, keepdim=True))",
        right="m = s.gt(0).to(h)\nh = h * ((h * m).sum(-1, keepdim=True) / m.sum(-1, keepdim=True).clamp(min=1))",
        prepare=_zero,
        op="div",
        at="m.sum(",
        is_free=True,
    ),
    Plant(
        name="log-of-negative",
        lines="h = h + torch.log(s - 3.0)",
        right=None,
        prepare=lambda batch, sample: None,
        op="log",
        at="torch.log(",
        guilty="all",
    ),
    Plant(
        name="root-of-negative",
        lines="h = h + torch.sqrt(h.mean(-1, keepdim=True) - 9.0)",
        right=None,
        prepare=lambda batch, sample: None,
        op="sqrt",
        at="torch.sqrt(",
        guilty="all",
    ),
    Plant(
        name="distance-of-equals",
        lines="z = h * s\nh = h + torch.sqrt((z**2).sum(-1, keepdim=True))",
        right="z = h * s\nh = h + torch.sqrt((z**2).sum(-1, keepdim=True).clamp(min=1e-30))",
        prepare=_zero,
        op="sqrt",
        at="torch.sqrt(",
    ),
    Plant(
        name="divergence",
        lines="return (torch.exp(h + s) - (h + s) - 1).mean()",
        right="return (torch.exp(h + s) - (h + s) - 1).mean()",
        prepare=_large,
        op="exp",
        at="torch.exp(",
        in_loss=True,
        is_beyond=True,
    ),
    Plant(
        name="poisson",
        lines="rate = h + s\nreturn (rate.exp() - 3 * rate).mean()",
        right="rate = h + s\nreturn (rate.exp() - 3 * rate).mean()",
        prepare=_large,
        op="exp",
        at=".exp()",
        in_loss=True,
        is_beyond=True,
    ),
    Plant(
        name="weighted-error",
        lines="weight = torch.clamp(s, max=0.3) / s\nreturn (weight * (h - 1) ** 2).mean()",
        right="weight = torch.where(s > 0.3, 0.3 / s, 1.0)\nreturn (weight * (h - 1) ** 2).mean()",
        prepare=_zero,
        op="div",
        at="/ s",
        in_loss=True,
    ),
    Plant(
        name="log-likelihood",
        lines="return -torch.log(torch.softmax(h * 200 * s, -1)[:, 0]).mean()",
        right="return -torch.log_softmax(h * 200 * s, -1)[:, 0].mean()",
        prepare=lambda batch, sample: None,
        op="log",
        at="torch.log(",
        guilty="unknown",
        in_loss=True,
    ),
    Plant(
        name="focal-loss",
        lines="p = torch.sigmoid(h * 200 * s)\nreturn -((1 - p) ** 2 * torch.log(p)).mean()",
        right="q = h * 200 * s\nreturn -(torch.sigmoid(-q) ** 2 * F.logsigmoid(q)).mean()",
        prepare=lambda batch, sample: None,
        op="log",
        at="torch.log(",
        guilty="unknown",
        in_loss=True,
    ),
    Plant(
        name="gumbel-noise",
        lines="h = h - torch.log(-torch.log(s.clamp(max=0.9)))",
        right=None,
        prepare=_zero,
        op="log",
        at="torch.log(",
    ),
    Plant(
        name="cosine-of-nothing",
        lines="n = s.norm(dim=-1, keepdim=True) * h.norm(dim=-1, keepdim=True)\n"
        "h = h * ((s * h).sum(-1, keepdim=True) / n)",
        right="n = s.norm(dim=-1, keepdim=True).clamp(min=1e-30) * h.norm(dim=-1, keepdim=True)\n"
        "h = h * (s * h).sum(-1, keepdim=True) / n",
        prepare=_zero,
        op="div",
        at="/ n",
        is_free=True,
    ),
    Plant(
        name="geometric-mean",
        lines="h = h * torch.exp(torch.log(s * h.abs()).mean(-1, keepdim=True))",
        right="q = torch.where(s > 0, s, 1.0) * h.abs()\n"
        "h = h * torch.exp(torch.log(q).mean(-1, keepdim=True)) * (s > 0).all(-1, keepdim=True)",
        prepare=_zero,
        op="log",
        at="torch.log(",
    ),
    Plant(
        name="inverse-softplus",
        lines="h = h + torch.log(torch.exp(s) - 1)",
        right="h = h + s + torch.log(-torch.expm1(-s))",
        prepare=_large,
        op="exp",
        at="torch.exp(s)",
    ),
    Plant(
        name="student-likelihood",
        lines="r = h - s\nreturn torch.log(1 + r**2 / 3).mean()",
        right="r = h - s\nreturn torch.log(1 + r**2 / 3).mean()",
        prepare=_huge,
        op="pow",
        at="r**2",
        in_loss=True,
    ),
    Plant(
        name="pseudo-huber",
        lines="r = h - s\nreturn (torch.sqrt(1 + r**2) - 1).mean()",
        right="r = h - s\nreturn (torch.sqrt(1 + r**2) - 1).mean()",
        prepare=_huge,
        op="pow",
        at="r**2",
        in_loss=True,
    ),
    Plant(
        name="hyperbolic-distance",
        lines="d = ((h * s) ** 2).sum(-1, keepdim=True)\nh = h + torch.acosh(1 + 2 * d)",
        right="d = ((h * s) ** 2).sum(-1, keepdim=True)\n"
        "h = h + torch.where(d > 0, torch.acosh(1 + 2 * torch.where(d > 0, d, 1.0)), 0.0)",
        prepare=_zero,
        op="acosh",
        at="torch.acosh(",
    ),
    Plant(
        name="logistic-bin",
        lines="p = torch.sigmoid(s + 0.5) - torch.sigmoid(s - 0.5)\nh = h + torch.log(p)",
        right="h = h + F.logsigmoid(s + 0.5) + F.logsigmoid(0.5 - s) + math.log(1 - math.exp(-1))",
        prepare=_large,
        op="log",
        at="torch.log(p)",
    ),
    Plant(
        name="box-cox",
        lines="h = h + ((1 + h.abs()) ** s - 1) / s",
        right="y = ((1 + h.abs()) ** s - 1) / torch.where(s == 0, 1.0, s)\n"
        "h = h + torch.where(s == 0, torch.log(1 + h.abs()), y)",
        prepare=_zero,
        op="div",
        at="/ s",
    ),
    Plant(
        name="contrast",
        lines="u = F.normalize(h)\ne = torch.exp(u @ u.T * s.sum())\n"
        "return -torch.log(e.roll(1, -1).diagonal() / e.sum(-1)).mean()",
        right="u = F.normalize(h)\nreturn -torch.log_softmax(u @ u.T * s.sum(), -1).roll(1, -1).diagonal().mean()",
        prepare=_large,
        op="exp",
        at="torch.exp(",
        guilty="unknown",
        in_loss=True,
    ),
    Plant(
        name="slerp",
        lines="h = h * (torch.sin(0.3 * s) / torch.sin(s))",
        right="h = h * torch.where(s == 0, 0.3, torch.sin(0.3 * s) / torch.sin(torch.where(s == 0, 1.0, s)))",
        prepare=_zero,
        op="div",
        at="torch.sin(s)",
    ),
    Plant(
        name="harmonic-mean",
        lines="q = s * h.abs()\nh = h * (q.shape[-1] / (1 / q).sum(-1, keepdim=True))",
        right="q = torch.where(s > 0, s, 1.0) * h.abs()\n"
        "h = h * (q.shape[-1] / (1 / q).sum(-1, keepdim=True)) * (s > 0).all(-1, keepdim=True)",
        prepare=_zero,
        op="reciprocal",
        at="(1 / q)",
    ),
    Plant(
        name="transport-row",
        lines="k = torch.exp(-s * s)\nh = h * (k / k.sum(-1, keepdim=True))",
        right="h = h * torch.softmax(-s * s, -1)",
        prepare=_large,
        op="div",
        at="k.sum(",
    ),
)
"""The plants, in the order in which they take turns."""
