"""`Bug`: a released version of a package, the step that fails as was reported, and what is true of it.

In: what the modules beside this one write down. Out: the record, and `install`, which fetches its packages.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sick_models.case import Batch, Call, Case, Phase, healthy
from torch import Tensor, nn

from nandoctor.evidence.report import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A bug, the step that shows it, and labels made by hand, from the report and the source, before a tool was asked.

    `packages` begins with the version before the fix; the others are what importing it takes. `inputs` are the arrays
    of the batch that the model is called with. The control is the same step on a batch or with a model that the code is
    fine with. `reason` says why the labels are what they are; they are those of `sick_models.Case`. `upstream` is what
    was merged against the bug, "" if nothing was; with `upstream_replaces` that puts a number in the place of a value
    that the formula gives, or tends to.
    """

    title: str
    url: str
    packages: tuple[str, ...] = ()
    model: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    batch: Callable[[], Batch]
    healthy_batch: Callable[[], Batch] | None = None
    healthy_model: Callable[[], nn.Module] | None = None
    loss: Callable[[Any, Batch], Tensor] | None = None
    reason: str
    upstream: str = ""
    upstream_replaces: bool = False
    verdict: Verdict = "numerics"
    phase: Phase = "forward"
    module: str = ""
    op: str = ""
    line: str = ""
    cause: str

    def case(self) -> Case:
        """The step that fails, in the form that the tools are asked in."""
        return Case(
            name=self.title,
            mechanism="released package",
            build=self.model,
            batch=self.batch,
            call=positional(*self.inputs),
            loss=self.loss,
            verdict=self.verdict,
            phase=self.phase,
            module=self.module,
            op=self.op,
            line=self.line,
            cause=self.cause,
        )

    def control(self) -> Case:
        """The same step where nothing is wrong."""
        build, batch = self.healthy_model or self.model, self.healthy_batch or self.batch
        return healthy(replace(self.case(), name=f"{self.title} (control)", build=build, batch=batch))


def positional(*names: str) -> Call:
    """A call of the model with these arrays of the batch, in this order."""
    return lambda model, batch: model(*(batch[name] for name in names))


def install(packages: tuple[str, ...], cache: Path) -> list[Path]:
    """Have each package in a folder of its own in the cache, without its dependencies: no other torch comes along."""
    folders = [cache / package for package in packages]
    for package, folder in zip(packages, folders, strict=True):
        if not folder.is_dir():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
            subprocess.run(command, check=True)
    return folders
