"""Bugs of released packages, each cited, at a version that has them: what nandoctor and other tools say of each.

In: `python benchmarks/real_bugs.py [--cache FOLDER]`; pip fetches the packages into that folder, without dependencies.
Out: cause and fix of every bug; and per tool a table of the bugs and healthy controls: alarm, module, op and line.

The labels were made by hand, from the issue and the package's source, before any tool was asked. A control is the same
code on a batch that it is fine with. Where the step does not end non-finite by itself, or a control does, the benchmark
stops: its labels would be wrong.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peers import (
    Claim,
    Tool,
    ask_anomaly_mode,
    ask_nandoctor,
    ask_plain_hooks,
    ask_torchlens,
    ask_transformers,
    names_module,
    names_op,
)
from sick_models import Case
from sick_models.case import positional, seeded
from sick_models.judging import diagnose
from sick_models.probing import run
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A case, where it was reported, and what has to be installed for it."""

    url: str
    packages: tuple[str, ...]
    case: Case


class Restore(nn.Module):
    """Images -> a restored image and its MS-SSIM to the target, as a model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.restore = nn.Conv2d(1, 1, 1)
        nn.init.constant_(self.restore.weight, 1.0)
        nn.init.zeros_(self.restore.bias)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        """One similarity for each image."""
        similarity = importlib.import_module("pytorch_msssim")
        return similarity.ms_ssim(self.restore(image).float(), target, data_range=1, size_average=False)


class Motion(nn.Module):
    """A state that moves, integrated together with what the way costs so far, at a price for each unit of time."""

    def __init__(self) -> None:
        super().__init__()
        self.force = nn.Linear(2, 2)

    def forward(self, state: Tensor, price: Tensor) -> Tensor:
        """The state at time 1."""
        solver = importlib.import_module("torchdiffeq")

        def move(_time: Tensor, now: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return price, torch.tanh(self.force(now[1])).float()

        start = torch.zeros_like(price), state
        result: Tensor = solver.odeint(move, start, torch.tensor([0.0, 1.0]))[1][-1]
        return result


class Chooser(nn.Module):
    """Scores over classes, of which those that are not on offer are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 5)

    def forward(self, x: Tensor, closed: Tensor) -> Tensor:
        """Scores [batch, 5]."""
        return self.score(x).float().masked_fill(closed, -torch.inf)


def sparse_loss(output: Tensor, batch: Batch) -> Tensor:
    """The mean of entmax's loss."""
    loss: Tensor = importlib.import_module("entmax").sparsemax_loss(output, batch["label"]).mean()
    return loss


class Listener(nn.Module):
    """Waves through a learned gain -> the mean magnitude of their spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        stft = importlib.import_module("nnAudio.features.stft").STFT
        self.stft = stft(n_fft=32, hop_length=16, output_format="Magnitude", verbose=False)

    def forward(self, waves: Tensor) -> Tensor:
        """Magnitudes [batch, bins, frames]."""
        magnitudes: Tensor = self.stft(waves * self.gain)
        return magnitudes


class Pose(nn.Module):
    """Rotation matrices, stretched by a learned factor -> quaternions."""

    def __init__(self) -> None:
        super().__init__()
        self.stretch = nn.Parameter(torch.ones(1))

    def forward(self, rotation: Tensor) -> Tensor:
        """Quaternions [batch, 4]."""
        conversions = importlib.import_module("kornia.geometry.conversions")
        order = conversions.QuaternionCoeffOrder.WXYZ
        result: Tensor = conversions.rotation_matrix_to_quaternion(rotation * self.stretch, order=order)
        return result


class Tangent(nn.Module):
    """Symmetric matrices, stretched by a learned factor -> their lengths as tangents of a manifold."""

    def __init__(self) -> None:
        super().__init__()
        self.stretch = nn.Parameter(torch.ones(1))

    def forward(self, tangent: Tensor) -> Tensor:
        """Lengths [batch]."""
        manifold = importlib.import_module("geoopt").SymmetricPositiveDefinite()
        length: Tensor = manifold.norm(torch.eye(2).expand(len(tangent), 2, 2), tangent * self.stretch)
        return length


class Features(nn.Module):
    """Images -> features of unit length at every pixel, as a perceptual loss takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, image: Tensor) -> Tensor:
        """Features [batch, channels, height, width]."""
        normalize = importlib.import_module("monai.losses.perceptual").normalize_tensor
        result: Tensor = normalize(image * self.gain)
        return result


class Magnitudes(nn.Module):
    """Magnitudes of a spectrogram -> cleaned ones, none of which is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.clean = nn.Linear(4, 4)
        nn.init.eye_(self.clean.weight)
        nn.init.zeros_(self.clean.bias)

    def forward(self, noisy: Tensor) -> Tensor:
        """Magnitudes [batch, 4]."""
        return torch.relu(self.clean(noisy)).float()


class Colors(nn.Module):
    """Spectra of pixels, scaled by a learned gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, image: Tensor) -> Tensor:
        """Spectra [batch, channels, height, width]."""
        return image * self.gain


class Pooled(nn.Module):
    """Nodes of graphs, scaled by a learned gain -> the product of each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.pool = importlib.import_module("torch_geometric.nn").MulAggregation()

    def forward(self, nodes: Tensor, graph: Tensor) -> Tensor:
        """Products [graphs, features]."""
        product: Tensor = self.pool(nodes * self.gain, graph)
        return product


class Bayes(nn.Module):
    """A linear layer with a distribution over its weights -> its output, and the log of the weights' prior."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        layer = importlib.import_module("blitz.modules").BayesianLinear
        self.layer = layer(3, 2, posterior_mu_init=mean)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Output [batch, 2] and a number."""
        return {"out": self.layer(x), "log_prior": self.layer.log_prior}


class Pairs(nn.Module):
    """Features of candidate spans and of tokens -> logits of both."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.start, self.end = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)
        nn.init.ones_(self.pair.weight)

    def forward(self, spans: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Logits of spans [batch, queries, spans] and of the tokens that they begin and end with."""
        pairs, starts, ends = self.pair(spans), self.start(tokens), self.end(tokens)
        return {"pair": pairs.squeeze(-1), "start": starts.squeeze(-1), "end": ends.squeeze(-1)}


def consistency(output: Any, batch: Batch) -> Tensor:
    """How far the logits of spans and of tokens disagree."""
    losses = importlib.import_module("gliner2.models.boundary.losses")
    keep = torch.ones_like(output["start"], dtype=torch.bool)
    loss: Tensor = losses.marginal_pair_consistency_loss(
        output["pair"], batch["places"], batch["valid"], output["start"], output["end"], keep
    )
    return loss


def spans(*, certain: bool) -> Batch:
    """Three spans over five tokens for one query, one of them perhaps with a logit far above the others."""
    features = 0.5 * torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    features[0, 0, 1] = 40.0 if certain else 0.4
    places = torch.tensor([[[[0, 1], [1, 3], [2, 4]]]])
    tokens = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(1))
    return {"spans": features, "tokens": tokens, "places": places, "valid": torch.ones(1, 1, 3, dtype=torch.bool)}


def loudness(output: Tensor, _batch: Batch) -> Tensor:
    """The mean magnitude."""
    return output.float().mean()


def magnitude_loss(output: Tensor, batch: Batch) -> Tensor:
    """The distance of log magnitudes."""
    loss: Tensor = importlib.import_module("auraloss.freq").STFTMagnitudeLoss()(output, batch["clean"])
    return loss


def angle_loss(output: Tensor, batch: Batch) -> Tensor:
    """The mean angle between spectra."""
    loss: Tensor = importlib.import_module("torchmetrics.functional.image").spectral_angle_mapper(
        output, batch["target"]
    )
    return loss


def images(*, negative: bool) -> Batch:
    """Images, and targets that are their negatives or themselves with a little noise."""
    image = torch.rand(2, 1, 192, 192, generator=torch.Generator().manual_seed(0))
    noise = 0.01 * torch.rand(2, 1, 192, 192, generator=torch.Generator().manual_seed(1))
    return {"image": image, "target": 1 - image if negative else image + noise}


def choices(*, closed: bool) -> Batch:
    """Six features, one class that may be closed, and labels among the others."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(4, 5, dtype=torch.bool)
    hidden[:, 4] = closed
    return {"x": x, "closed": hidden, "label": torch.tensor([0, 1, 2, 3])}


def waves(*, silent: bool) -> Batch:
    """Two waves, the second one perhaps silence."""
    both = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    both[1] *= not silent
    return {"waves": both}


def rotations(*, half_turn: bool) -> Batch:
    """A turn about no axis in particular, twice, or once and half a turn about the first axis."""
    turn = torch.tensor([[0.3131, -0.0202, 0.9495], [0.8283, 0.4949, -0.2626], [-0.4646, 0.8687, 0.1717]])
    half = torch.diag(torch.tensor([1.0, -1.0, -1.0]))
    return {"rotation": torch.stack([turn, half if half_turn else turn.T])}


def spectra(*, black: bool) -> Batch:
    """Spectra of 8 x 8 pixels, one pixel of the second image perhaps black."""
    image = 0.1 + torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    image[1, :, 5, 3] *= not black
    return {"image": image, "target": 0.1 + torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def tangents(*, zero: bool) -> Batch:
    """Symmetric matrices, the second one perhaps zero."""
    tangent = torch.tensor([[[1.0, 0.5], [0.5, 2.0]], [[0.5, 0.0], [0.0, 1.0]]])
    tangent[1] *= not zero
    return {"tangent": tangent}


def magnitudes(*, silent: bool) -> Batch:
    """Magnitudes of four bins, one of the second frame perhaps silent."""
    noisy = 0.1 + torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    noisy[1, 2] *= not silent
    return {"noisy": noisy, "clean": torch.full((3, 4), 0.5)}


def graphs(*, large: bool) -> Batch:
    """Two graphs of 60 nodes: one whose product overflows before it meets a zero, or none."""
    nodes = torch.ones(120, 2)
    nodes[:60] = 10.0 if large else 1.1
    nodes[59, 0] = 0.0
    return {"nodes": nodes, "graph": torch.arange(120) // 60}


BUGS = (
    Bug(
        url="https://github.com/VainF/pytorch-msssim/issues/7",
        packages=("pytorch-msssim==0.1.5",),
        case=Case(
            name="pytorch-msssim: anti-correlated images",
            mechanism="outside the domain",
            build=Restore,
            batch=lambda: images(negative=True),
            call=positional("image", "target"),
            verdict="numerics",
            op="pow",
            line="msssim_val = torch.prod((mcs[:-1] ** weights[:-1].unsqueeze(1))",
            cause="invalid-domain",
            repair={"batch": lambda: images(negative=False)},
        ),
    ),
    Bug(
        url="https://github.com/rtqichen/torchdiffeq/issues/38",
        packages=("torchdiffeq==0.0.1",),
        case=Case(
            name="torchdiffeq: a state that stays at zero",
            mechanism="0/0, empty mean",
            build=Motion,
            batch=lambda: {"state": torch.ones(3, 2), "price": torch.zeros(3, 1)},
            call=positional("state", "price"),
            verdict="numerics",
            op="div",
            line="h0 = 0.01 * max(d0_ / d1_ for d0_, d1_ in zip(d0, d1))",
            cause="division-by-zero",
            repair={"batch": lambda: {"state": torch.ones(3, 2), "price": torch.ones(3, 1)}},
        ),
    ),
    Bug(
        url="https://github.com/deep-spin/entmax/issues/9",
        packages=("entmax==1.3",),
        case=Case(
            name="entmax: a class that is closed",
            mechanism="inf - inf, 0 * inf",
            build=Chooser,
            batch=lambda: choices(closed=True),
            call=positional("x", "closed"),
            loss=sparse_loss,
            phase="loss",
            verdict="numerics",
            module="<loss>",
            op="einsum",
            line='loss += torch.einsum("ij,ij->i", p_star, X)',
            cause="indeterminate-form",
            repair={"batch": lambda: choices(closed=False)},
        ),
    ),
    Bug(
        url="https://github.com/KinWaiCheuk/nnAudio/issues/138",
        packages=("nnAudio==0.3.3", "scipy==1.14.1"),
        case=Case(
            name="nnAudio: silence",
            mechanism="gradient singularity",
            build=Listener,
            batch=lambda: waves(silent=True),
            call=positional("waves"),
            loss=loudness,
            phase="backward",
            verdict="numerics",
            module="stft",
            op="sqrt",
            line="return torch.sqrt(spec)",
            cause="gradient-singularity",
            repair={"batch": lambda: waves(silent=False)},
        ),
    ),
    Bug(
        url="https://github.com/fastino-ai/GLiNER2/pull/155",
        packages=(
            "gliner2==2.0.0",
            "requests==2.32.3",
            "urllib3==2.2.3",
            "charset-normalizer==3.3.2",
            "certifi==2024.8.30",
        ),
        case=Case(
            name="gliner2: a bound that fp16 rounds to one",
            mechanism="eps lost",
            build=seeded(Pairs),
            batch=lambda: spans(certain=True),
            call=positional("spans", "tokens"),
            loss=consistency,
            phase="backward",
            verdict="precision",
            module="<loss>",
            op="log1p",
            line="log_survival = torch.log1p(-probabilities.clamp(max=1.0 - 1e-6))",
            cause="eps-underflow",
            repair={"batch": lambda: spans(certain=False)},
        ),
    ),
    Bug(
        url="https://github.com/kornia/kornia/issues/1653",
        packages=("kornia==0.6.4",),
        case=Case(
            name="kornia: half a turn to a quaternion",
            mechanism="where trap",
            build=Pose,
            batch=lambda: rotations(half_turn=True),
            call=positional("rotation"),
            loss=loudness,
            phase="backward",
            verdict="numerics",
            op="sqrt",
            line="sq = torch.sqrt(trace + 1.0) * 2.0",
            cause="where-gradient-trap",
            near_causes=("gradient-singularity",),
            repair={"batch": lambda: rotations(half_turn=False)},
        ),
    ),
    Bug(
        url="https://github.com/geoopt/geoopt/issues/243",
        packages=("geoopt==0.5.1", "scipy==1.14.1"),
        case=Case(
            name="geoopt: the length of a zero tangent",
            mechanism="gradient singularity",
            build=Tangent,
            batch=lambda: tangents(zero=True),
            call=positional("tangent"),
            loss=loudness,
            phase="backward",
            verdict="numerics",
            op="pow",
            line="return self.inner(x, u, keepdim=keepdim) ** 0.5",
            cause="gradient-singularity",
            repair={"batch": lambda: tangents(zero=False)},
        ),
    ),
    Bug(
        url="https://github.com/Project-MONAI/MONAI/pull/8982",
        packages=("monai==1.3.0",),
        case=Case(
            name="monai: features of a black pixel",
            mechanism="gradient singularity",
            build=Features,
            batch=lambda: spectra(black=True),
            call=positional("image"),
            loss=loudness,
            phase="backward",
            verdict="numerics",
            op="sqrt",
            line="norm_factor = torch.sqrt(torch.sum(x**2, dim=1, keepdim=True))",
            cause="gradient-singularity",
            repair={"batch": lambda: spectra(black=False)},
        ),
    ),
    Bug(
        url="https://github.com/csteinmetz1/auraloss/issues/63",
        packages=("auraloss==0.4.0",),
        case=Case(
            name="auraloss: the logarithm of a silent bin",
            mechanism="outside the domain",
            build=Magnitudes,
            batch=lambda: magnitudes(silent=True),
            call=positional("noisy"),
            loss=magnitude_loss,
            phase="loss",
            verdict="numerics",
            module="<loss>",
            op="log",
            line="x_mag = torch.log(x_mag)",
            cause="log-of-zero",
            repair={"batch": lambda: magnitudes(silent=False)},
        ),
    ),
    Bug(
        url="https://github.com/Lightning-AI/torchmetrics/issues/3322",
        packages=("torchmetrics==1.8.0",),
        case=Case(
            name="torchmetrics: the angle of a black pixel",
            mechanism="0/0, empty mean",
            build=Colors,
            batch=lambda: spectra(black=True),
            call=positional("image"),
            loss=angle_loss,
            phase="loss",
            verdict="numerics",
            module="<loss>",
            op="div",
            line="sam_score = torch.clamp(dot_product / (preds_norm * target_norm), -1, 1).acos()",
            cause="division-by-zero",
            repair={"batch": lambda: spectra(black=False)},
        ),
    ),
    Bug(
        url="https://github.com/pyg-team/pytorch_geometric/issues/8726",
        packages=("torch_geometric==2.4.0", "scipy==1.14.1"),
        case=Case(
            name="torch_geometric: a product past the range",
            mechanism="inf - inf, 0 * inf",
            build=Pooled,
            batch=lambda: graphs(large=True),
            call=positional("nodes", "graph"),
            verdict="numerics",
            module="pool",
            op="scatter_reduce",
            line="return src.new_ones(size).scatter_reduce_(",
            cause="reduction-overflow",
            near_causes=("indeterminate-form",),
            repair={"batch": lambda: graphs(large=False)},
        ),
    ),
    Bug(
        url="https://github.com/piEsposito/blitz-bayesian-deep-learning/issues/98",
        packages=("blitz-bayesian-pytorch==0.2.7",),
        case=Case(
            name="blitz: weights far from their prior",
            mechanism="outside the domain",
            build=seeded(Bayes, 3.0),
            batch=lambda: {"x": torch.ones(4, 3)},
            call=positional("x"),
            verdict="numerics",
            module="layer",
            op="log",
            line="return (torch.log(prior_pdf) - 0.5).sum()",
            cause="log-of-zero",
            repair={"build": seeded(Bayes, 0.0)},
        ),
    ),
)

TOOLS: dict[str, Tool] = {
    "nandoctor": ask_nandoctor,
    "plain hooks with isfinite": ask_plain_hooks,
    "transformers DebugUnderflowOverflow": ask_transformers,
    "torch.autograd.detect_anomaly": ask_anomaly_mode,
    "TorchLens find_nan": ask_torchlens,
}
TORCHLENS = ("torchlens==2.36.1", "graphviz==0.20.3")


def fetch(packages: tuple[str, ...], cache: Path) -> None:
    """Install packages into folders of their own in the cache, and put them on the import path."""
    for package in packages:
        folder = cache / package
        if not folder.is_dir():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
            subprocess.run(command, check=True)
        sys.path.insert(0, str(folder))  # before another version that is installed


def fails(case: Case) -> bool:
    """Run the plain step under emulated autocast: True if output, loss or gradients are non-finite, or it raises."""
    torch.manual_seed(0)
    try:
        return bool(run(case, autocast=True).first_nonfinite)
    except AssertionError:  # a package's own check
        return True


def claim_of(tool: Tool, case: Case) -> Claim:
    """What a tool says; that it crashed where it fails on the step itself."""
    torch.manual_seed(0)
    try:
        return tool(case)
    except Exception:  # of any package, and of any tool on it
        return Claim(crashed=True)


def right(case: Case, claim: Claim) -> str:
    """Which of module, op and line a claim has right."""
    if claim.crashed or not claim.alarm:
        return "crashed" if claim.crashed else "no alarm"
    found = {
        "module": names_module(case, claim),
        "op": names_op(case, claim),
        "line": bool(case.line) and case.line in claim.line,
    }
    return ", ".join(name for name, is_right in found.items() if is_right) or "alarm, nothing right"


def describe(case: Case) -> str:
    """The cause that nandoctor names, beside the label, and its first verified fix."""
    with tempfile.TemporaryDirectory() as folder:
        report = diagnose(case, Path(folder), fixes=True)
    code = report.cause.code if report.cause else None
    fix = next((item.title for item in report.fixes if item.verified), "none verified")
    return f"{report.verdict}, {code} ({'right' if code in case.causes else f'label: {case.cause}'}); fix: {fix}"


def main() -> None:
    """Print the table, tool by tool: TorchLens comes last, because it wraps torch's functions for good."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "nandoctor-real-bugs")
    options: Any = parser.parse_args()
    fetch(TORCHLENS, options.cache)
    healthy = {}
    for bug in BUGS:
        fetch(bug.packages, options.cache)
        assert fails(bug.case), bug.case.name
        healthy[bug.case.name] = replace(bug.case.twin(), name=f"{bug.case.name}, healthy")
        assert not fails(healthy[bug.case.name]), bug.case.name
        print(f"{bug.case.name}\n  {', '.join(bug.packages)}; {bug.url}\n  {describe(bug.case)}")
    for name, tool in TOOLS.items():
        print(f"\n{name}")
        for bug in BUGS:
            alarm = claim_of(tool, healthy[bug.case.name])
            control = "crashed" if alarm.crashed else "FALSE ALARM" if alarm.alarm else "silent"
            print(
                f"  {bug.case.name:<46} {right(bug.case, claim_of(tool, bug.case)):<22} control: {control}", flush=True
            )


if __name__ == "__main__":
    main()
