"""Measure the search for minimal fp32 sets on a network of 63 modules with two independent overflows.

`python benchmarks/fp32_search.py` prints probes and time, with and without the diagnosis as a first guess.
"""

from __future__ import annotations

import math
import time

import torch
from torch import nn

from nandoctor.autocast.policy import Policy
from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.engine.call import Call, Mode
from nandoctor.engine.runner import FailingStep
from nandoctor.evidence.formats import FP16
from nandoctor.fixes.fp32_sets import find_minimal_sets
from nandoctor.fixes.verify import TrialBudget, Trials


class Lane(nn.Module):
    """Thirty layers, one with outputs above 65504."""

    def __init__(self, loud: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(29))
        self.calm = nn.LayerNorm(64)
        for index, layer in enumerate(self.layers):
            nn.init.eye_(layer.weight)
            layer.weight.data += torch.linspace(0, 1e4 if index == loud else 1e-3, 64)[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 64) to (N, 64), rescaled after each layer."""
        for layer in self.layers:
            x = layer(x)
            x = x / x.float().abs().amax(-1, keepdim=True)
        return self.calm(x)


class TwoLanes(nn.Module):
    """Two parallel lanes, each with its own overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Lane(13), Lane(22)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Pass (N, 64) through both lanes."""
        return [self.left(x), self.right(x)]


def main() -> None:
    """Print probes and time, with and without the diagnosis as a first guess."""
    torch.manual_seed(0)
    model = TwoLanes()
    batch = {"x": torch.rand(16, 64) + 0.5}
    step = FailingStep(
        model=model,
        call=Call(batch=batch, used=frozenset(batch), forward=lambda arrays: model(arrays["x"])),
        mode=Mode(policy=Policy(name="cuda", format=FP16), device=torch.device("cpu")),
    )

    members = [KeepModule(module=name) for name, module in model.named_modules() if not list(module.children())]
    members += [KeepModule(module=name, children=False) for name in ("", "left", "right")]
    blamed = [member for member in members if member.module in ("left.layers.13", "right.layers.22")]
    for name, guesses in (("without a guess", []), ("with the diagnosis as a guess", [blamed])):
        budget = TrialBudget()
        trials = Trials(step, budget, numerics=False)
        started = time.perf_counter()
        first, *others = find_minimal_sets(members, lambda kept, t=trials: t.judge(*kept).passes, guesses=guesses)
        elapsed_s = time.perf_counter() - started
        bound = 4 * len(first) * math.log2(len(members))
        print(
            f"{len(members)} modules, {name}: {', '.join(member.module for member in first)} "
            f"and {len(others)} further sets; {budget.num_run} runs (bound {bound:.0f}), {elapsed_s:.2f} s"
        )


if __name__ == "__main__":
    main()
