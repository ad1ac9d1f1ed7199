"""Bugs of released packages, each cited, at a version that has them: what nandoctor and other tools say of each.

In: `python benchmarks/real_bugs.py [--cache FOLDER]`; pip fetches the packages into that folder, without dependencies.
Out: a table per bug and per healthy control: alarm, module, op, line, cause and fix.

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
    ask_transformers,
    names_module,
    names_op,
)
from sick_models import Case
from sick_models.case import positional
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


def loudness(output: Tensor, _batch: Batch) -> Tensor:
    """The mean magnitude."""
    return output.float().mean()


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
)

TOOLS: dict[str, Tool] = {
    "nandoctor": ask_nandoctor,
    "plain hooks with isfinite": ask_plain_hooks,
    "transformers DebugUnderflowOverflow": ask_transformers,
    "torch.autograd.detect_anomaly": ask_anomaly_mode,
}


def fetch(bug: Bug, cache: Path) -> None:
    """Install what the bug needs into folders of its own in the cache, and put them on the import path."""
    for package in bug.packages:
        folder = cache / package
        if not folder.is_dir():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
            subprocess.run(command, check=True)
        sys.path.append(str(folder))


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
    """Print the table."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "nandoctor-real-bugs")
    options: Any = parser.parse_args()
    for bug in BUGS:
        fetch(bug, options.cache)
        assert fails(bug.case), bug.case.name
        healthy = replace(bug.case.twin(), name=f"{bug.case.name}, healthy")
        assert not fails(healthy), healthy.name
        print(f"{bug.case.name}\n  {', '.join(bug.packages)}; {bug.url}")
        for name, tool in TOOLS.items():
            alarm = claim_of(tool, healthy)
            control = "crashed" if alarm.crashed else "FALSE ALARM" if alarm.alarm else "silent"
            print(f"  {name:<38} {right(bug.case, claim_of(tool, bug.case)):<22} control: {control}")
        print(f"  {'nandoctor says':<38} {describe(bug.case)}\n")


if __name__ == "__main__":
    main()
