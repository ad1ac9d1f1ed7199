"""Compare the time forecast after the first run with the time that the rest of the diagnosis took.

`python benchmarks/forecast.py` prints a line for each step, forecast over actual; exit status 1 if one is off by more
than a factor of two.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from torch import nn
from workloads import Workload, dump_of, make_encoder, make_unet

import nandoctor
from nandoctor.replaying.progress import Listener

OFF_BY = 2.0


class Loop(nn.Module):
    """A field integrated in many small steps: (N, 8) to (N, 8)."""

    def __init__(self, num_steps: int = 400) -> None:
        super().__init__()
        self.field, self.num_steps = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), num_steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the final state."""
        for _ in range(self.num_steps):
            x = x + self.field(x) / self.num_steps
        return x


def make_loop() -> Workload:
    """Return a workload of thousands of small operations."""
    return Workload(
        name="loop",
        description="400 steps of a field with two linear layers, 4 x 8 numbers",
        build=Loop,
        batch={"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))},
        middle="field.2.weight",
        pick=lambda output: output,
    )


def main() -> int:
    """Print the table."""
    print("seconds told after the first run over those that the rest took")
    ratios = [ratio for workload in (make_encoder(), make_unet(), make_loop()) for ratio in _print_ratios(workload)]
    return 1 if any(not 1 / OFF_BY <= ratio <= OFF_BY for ratio in ratios) else 0


def _print_ratios(workload: Workload) -> list[float]:
    model, sick = workload.build().train(), workload.build_sick()
    steps: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "a middle layer overflows": (sick, {}),
        "the same, with a loss": (sick, {"loss": workload.loss}),
        "only gradients non-finite": (model, {"loss": workload.steep_loss}),
        "healthy": (model, {}),
        "healthy, with a loss": (model, {"loss": workload.loss}),
    }
    ratios = []
    for name, (failing, options) in steps.items():
        ratios.append(_measure_ratio(workload, failing, options))
        print(f"  {ratios[-1]:6.2f}  {workload.name}: {name}", flush=True)
    return ratios


def _measure_ratio(workload: Workload, model: nn.Module, options: dict[str, Any]) -> float:
    """Return the ratio of the last of three replays: the first fills caches."""
    told: list[tuple[float, float]] = []

    def note(progress: Listener, num_runs: float) -> None:
        told.append((time.perf_counter(), num_runs * progress.elapsed_s))

    with dump_of(workload, model) as path, mock.patch.object(Listener, "expect_rest", note):
        for _ in range(3):
            nandoctor.replay(path, model=lambda: model, fixes=False, mode="train", **options)
            begun, seconds = told[-1]
            taken = time.perf_counter() - begun
    return seconds / taken


if __name__ == "__main__":
    raise SystemExit(main())
