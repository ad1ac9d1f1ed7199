"""Mechanisms that stranger code showed: each class with unlike cases, as rows of code, batch and the right answer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import nandoctor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step and what is right to say of it.

    `forward` is the code under examination, a method of a module that has `layers`; `line` is a part of the guilty
    line's text. `samples` is () if none may be named. No sentence may hold any of `never`.
    """

    forward: Callable[..., Any]
    batch: Mapping[str, torch.Tensor]
    layers: Mapping[str, nn.Module | torch.Tensor] = field(default_factory=dict)
    loss: Callable[..., Any] | None = None
    saves: Mapping[str, Any] = field(default_factory=dict)
    autocast: bool = False
    verdict: str = "numerics"
    cause: str | None = None
    op: str | None = None
    line: str = ""
    samples: tuple[int, ...] | None = None
    says: str = ""
    notes: str = ""
    called_from: str | None = None
    never: tuple[str, ...] = ()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean(output: torch.Tensor, _batch: Any) -> torch.Tensor:
    return output.mean()


def mean_square(output: torch.Tensor, _batch: Any) -> torch.Tensor:
    return output.square().mean()


def scaled(layer: nn.Linear, gain: float, bias: float | None = None) -> nn.Linear:
    with torch.no_grad():
        layer.weight.mul_(gain)
        if bias is not None:
            layer.bias.fill_(bias)
    return layer


def build(case: Case) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in case.layers.items():
                is_buffer = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
                self.register_buffer(name, part.clone()) if is_buffer else setattr(self, name, part)

        forward = case.forward

    return Net()


def replay(case: Case, folder: Path, **options: Any) -> nandoctor.Report:
    model = build(case)
    with nandoctor.cuda_autocast() if case.autocast else contextlib.nullcontext():
        output = model(**case.batch)
    saved = {"logit": output.detach()} if isinstance(output, torch.Tensor) else {"autocast": False}
    torch.save({"state_dict": model.state_dict(), **case.batch, **saved, **case.saves}, folder / "step.pth")
    return nandoctor.replay(folder / "step.pth", build(case), loss=case.loss, **{"fixes": False, **options}).report


def check(case: Case, report: nandoctor.Report) -> None:
    origin, cause = report.origin, report.cause
    source = origin.source if origin is not None else None
    found = (report.verdict, cause and cause.code, origin and origin.op, source.text if source else "")
    assert found[:3] == (case.verdict, case.cause, case.op), report.headline
    assert case.line in found[3]
    if case.called_from is not None:
        assert origin is not None
        assert origin.called_from is not None
        assert case.called_from in origin.called_from.text
    if case.samples is not None:
        assert origin is not None
        assert (origin.elements.samples or ()) == case.samples
    assert case.says in report.headline
    assert case.notes in " ".join(report.notes)
    told = " ".join((report.headline, *(cause.explanation for cause in [cause] if cause), *report.notes))
    assert not [word for word in case.never if word in told], told


# Precision is not the story of a step that fails in fp32 too.


def entropy(self, x):
    share = torch.relu(self.narrow(self.wide(x) * 1e-5) - 50)
    return (share * torch.log(share)).sum(-1)


def ratio(self, x, count):
    pooled = self.wide(x).sum(-1)
    return pooled * 1e-6 / count


WIDE = {"wide": scaled(nn.Linear(6, 6), 1e6), "narrow": nn.Linear(6, 6)}
WORDS_OF_FP16 = ("fp16", "65,504", "autocast")
FIRST_IN_FP32 = {
    "0 * log(0) behind values of 1e5": Case(
        forward=entropy,
        layers=WIDE,
        batch={"x": normal(4, 6)},
        cause="log-of-zero",
        op="log",
        line="torch.log(share)",
        never=WORDS_OF_FP16,
    ),
    "a count of 0, in a file that says that autocast was off": Case(
        forward=ratio,
        layers=WIDE,
        batch={"x": normal(4, 6), "count": torch.tensor([3.0, 0.0, 2.0, 1.0])},
        saves={"autocast": False},
        cause="division-by-zero",
        op="div",
        line="/ count",
        samples=(1,),
        never=WORDS_OF_FP16,
    ),
    "recorded in fp16, and wrong in fp32": Case(
        forward=entropy,
        layers=WIDE,
        batch={"x": normal(4, 6)},
        autocast=True,
        cause="log-of-zero",
        op="log",
        line="torch.log(share)",
        never=WORDS_OF_FP16,
    ),
}


@pytest.mark.parametrize("name", FIRST_IN_FP32)
def test_what_fails_in_fp32_is_told_first(name, tmp_path):
    check(FIRST_IN_FP32[name], replay(FIRST_IN_FP32[name], tmp_path))


# A value that something removes in the forward, and whose infinite derivative meets a zero gradient.


def angle(self, x, width):
    return torch.atan(self.body(x) / width)


def odds(self, x, width):
    return torch.sigmoid(torch.log(torch.sigmoid(self.body(x)) * width))


def falloff(self, x, width):
    distance = self.body(x).square() * width
    return 1 / (1 + distance**-2)


def capped(self, x, width):
    inverse = torch.rsqrt(self.body(x).square() * width)
    return torch.minimum(inverse, torch.full_like(inverse, 3.0))


def assigned(self, x, width):
    ratio = self.body(x) / width
    ratio[width.expand_as(ratio) == 0] = 0
    return ratio


def multiplied(self, x, width):
    root = torch.sqrt(self.body(x).square() * width)
    return root * 0.5 * (width > 0).float()


def picked(self, x, width):
    logs = torch.log(self.body(x).square() * width)
    return logs[width[:, 0] > 0]


WIDTHS = {"x": normal(4, 3), "width": torch.tensor([[1.0], [0.5], [0.0], [2.0]])}
BODY = {"body": nn.Linear(3, 2)}


def removed(forward, op, cause, line, **fields):
    given = {"layers": BODY, "batch": WIDTHS, "loss": mean_square, "samples": (2,), **fields}
    return Case(forward=forward, op=op, cause=cause, line=line, **given)


REMOVED = {
    "atan of x / 0": removed(angle, "div", "division-by-zero", "/ width"),
    "sigmoid of log(0)": removed(odds, "log", "log-of-zero", "torch.log"),
    "1 / (1 + 0 ** -2)": removed(falloff, "pow", "division-by-zero", "distance**-2"),
    "a minimum with a cap": removed(capped, "rsqrt", "where-gradient-trap", "torch.rsqrt"),
    "an assignment by mask": removed(assigned, "div", "where-gradient-trap", "/ width"),
    "a product with a mask": removed(multiplied, "sqrt", "where-gradient-trap", "torch.sqrt", loss=mean),
    "an index by mask": removed(picked, "log", "where-gradient-trap", "torch.log"),
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_removed_a_value_is_told_by_the_gradient(name, tmp_path):
    check(REMOVED[name], replay(REMOVED[name], tmp_path))


def contrasted(self, x, other):
    distance = (self.body(x) - self.body(other)).square().sum(-1).sqrt()
    return torch.where(distance < 5, distance, torch.full_like(distance, 5.0))


def bounded(self, x, other):
    gap = (self.body(x) - self.body(other)).abs()
    return (gap**0.5).clamp(max=10.0)


EQUAL = {"x": normal(4, 3), "other": torch.cat([normal(1, 3), normal(3, 3, seed=1)])}
SELECTED = {
    "where keeps a distance of 0": removed(
        contrasted, "sqrt", "gradient-singularity", ".sqrt()", batch=EQUAL, samples=(0,), never=("`where`",)
    ),
    "a clamp that does not bind": removed(
        bounded, "pow", "gradient-singularity", "gap**0.5", batch=EQUAL, samples=(0,), never=("`clamp`",)
    ),
}


@pytest.mark.parametrize("name", SELECTED)
def test_a_selection_that_keeps_the_value_is_not_blamed(name, tmp_path):
    check(SELECTED[name], replay(SELECTED[name], tmp_path))


def checked(self, x):
    distance = torch.log(x - 9.0)
    if (distance > 50).any():
        raise ValueError("too far")
    return self.body(x)


def warned(self, x):
    share = (x * 0).sum() / (x * 0).sum()
    if share > 2:
        logging.getLogger(__name__).info("more than twice")
    return self.body(x)


def watched(self, x):
    assert torch.sqrt(x - 9.0).max() < 1e3 or not torch.sqrt(x - 9.0).max() > 1e3
    return self.body(x)


ONLY_COMPARED = {
    name: Case(forward=forward, layers=BODY, batch={"x": normal(4, 3)}, verdict="healthy")
    for name, forward in {"raises": checked, "prints": warned, "asserts": watched}.items()
}


@pytest.mark.parametrize("name", ONLY_COMPARED)
def test_nan_that_is_only_compared_is_healthy(name, tmp_path):
    check(ONLY_COMPARED[name], replay(ONLY_COMPARED[name], tmp_path))


# Derivatives that the forward or the loss takes itself: the singular op is that of the function, not the call of grad.


def forces(self, x, other):
    x = x.detach().requires_grad_()
    distance = (x - other).square().sum(-1).sqrt()
    energy = self.body(x).sum() + torch.exp(-distance).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def guarded_forces(self, x, other):
    x = x.detach().requires_grad_()
    squared = (x - other).square().sum(-1)
    energy = self.body(x).sum() + torch.where(squared > 0, torch.log(squared), 0.0).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def masked_forces(self, x, other):
    x = x.detach().requires_grad_()
    offset = (x - other).sum(-1)
    ratio = torch.where(offset != 0, (1 + offset / offset.abs()).square(), 0.0)
    return torch.autograd.grad(self.body(x).sum() + ratio.sum(), x, create_graph=True)[0]


def functional_forces(self, x, other):
    def energy(point):
        return self.body(point).sum() + (point - other).abs().pow(0.5).sum()

    return torch.func.grad(energy)(x)


def angle_and_place(self, x, other):
    x = x.detach().requires_grad_()
    cosine = (x * other).sum(-1) / (other * other).sum(-1)
    return {"angle": torch.acos(cosine.clamp(-1, 1)) + self.body(x).sum(-1), "x": x}


def slope(output, _batch):
    (gradient,) = torch.autograd.grad(output["angle"].sum(), output["x"], create_graph=True)
    return gradient.square().mean()


DERIVED = {
    "forces": removed(forces, "sqrt", "gradient-singularity", ".sqrt()", batch=EQUAL, samples=(0,)),
    "forces with a where": removed(
        guarded_forces, "log", "where-gradient-trap", "torch.log", batch=EQUAL, samples=(0,)
    ),
    "forces of a quotient that is hidden": removed(
        masked_forces, "div", "where-gradient-trap", "offset / offset.abs()", batch=EQUAL, samples=(0,)
    ),
    "forces by torch.func": removed(
        functional_forces, "pow", "gradient-singularity", ".pow(0.5)", batch=EQUAL, samples=(0,), loss=None
    ),
    "a slope in the loss": removed(
        angle_and_place, "acos", "gradient-singularity", "torch.acos", batch=EQUAL, samples=(0,), loss=slope
    ),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_derivative_is_at_the_line_of_its_function(name, tmp_path):
    check(DERIVED[name], replay(DERIVED[name], tmp_path))


# Ops in torch's or a package's own Python: the library's line, and beside it the user's.


def likelihood(self, x, width):
    return torch.distributions.Normal(self.body(x), width, validate_args=False).log_prob(x[:, :2])


def skipped(self, x):
    return self.skip(x)


def zeroed(layer, name):
    with torch.no_grad():
        layer.get_parameter(name).zero_()
    return layer


class Rms(LlamaRMSNorm):
    def __init__(self):
        super().__init__(3, eps=0.0)


parametrizations = nn.utils.parametrizations
INSIDE = {
    "a density without width": removed(
        likelihood, "log", "log-of-zero", "self.scale.log()", loss=None, called_from="log_prob(x[:, :2])"
    ),
    "a spectral norm of zeros": Case(
        forward=skipped,
        layers={"skip": zeroed(parametrizations.spectral_norm(nn.Linear(3, 2)), "parametrizations.weight.original")},
        batch={"x": normal(4, 3)},
        cause="division-by-zero",
        op="div",
        line="weight / sigma",
        says="because `skip.parametrizations.weight.original` is 0 throughout",
        called_from="self.skip(x)",
    ),
    "a norm of a package": Case(
        forward=skipped,
        layers={"skip": Rms()},
        batch={"x": torch.cat([normal(2, 3), torch.zeros(1, 3)])},
        cause="division-by-zero",
        op="rsqrt",
        line="torch.rsqrt",
        called_from="self.skip(x)",
        samples=(2,),
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_librarys_line_has_the_users_beside_it(name, tmp_path):
    check(INSIDE[name], replay(INSIDE[name], tmp_path))


# Where it grew: the steps from an overflow back to the exponent, the weight or the sample that gave most.


def similar(self, x, other):
    return self.log_scale.exp() * F.normalize(self.body(x)) @ F.normalize(self.body(other)).t()


def loud_weight(self, x):
    return self.wide(x).abs() @ self.body.weight.abs().t().new_full((6, 2), 2.0)


def steps_of(report):
    return [(step.op, step.place.module) for step in report.growth]


GROWN = {
    "a learned temperature": (
        Case(
            forward=similar,
            layers={**BODY, "log_scale": nn.Parameter(torch.tensor(12.0))},
            batch={"x": normal(4, 3), "other": normal(4, 3, seed=1)},
            autocast=True,
        ),
        [("exp", ""), ("weight", "log_scale")],
        "`self.log_scale.exp()` makes 162,755 of 12 (`log_scale`)",
    ),
    "a weight of 400,000": (
        Case(
            forward=loud_weight,
            layers={"wide": scaled(nn.Linear(3, 6), 1e5), **BODY},
            batch={"x": normal(4, 3)},
            autocast=True,
        ),
        [("weight", "wide.weight")],
        "",
    ),
}


@pytest.mark.parametrize("name", GROWN)
def test_growth_is_followed_to_what_gave_most(name, tmp_path):
    case, last, note = GROWN[name]
    report = replay(case, tmp_path)
    assert report.verdict == "precision", report.headline
    assert steps_of(report)[-len(last) :] == last
    assert note in " ".join(report.notes)
    assert all(step.absmax_out for step in report.growth)


def test_nothing_grew_without_an_overflow(tmp_path):
    assert replay(REMOVED["atan of x / 0"], tmp_path).growth == ()
