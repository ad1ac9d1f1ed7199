"""Measure what the recorder costs a training step: as a ratio to the plain step, and in time by the model's size.

`python benchmarks/capture.py [--device cuda]` prints two tables; README.md keeps them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import nandoctor

ROUNDS = 150
WARM_UP = 5
STEPS_A_ROUND = 30
"""The clock of processor time is too coarse for one step of the smallest models."""


class SmallNet(nn.Module):
    """Six convolutions with batch norm on 3 x 32 x 32 images."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [3] + [width] * 6
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class logits."""
        return self.head(self.blocks(x).mean(dim=(2, 3)))


class SmallTransformer(nn.Module):
    """Four layers (128 wide, 4 heads) on 64 tokens, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class logits."""
        return self.head(self.layers(self.embed(x)).mean(dim=1))


class Stack(nn.Module):
    """Blocks of three modules on 8 features, with 4 parameters and 0 or 3 buffers each."""

    def __init__(self, num_blocks: int, batch_norm: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d if batch_norm else nn.LayerNorm
        self.blocks = nn.Sequential(
            *(module for _ in range(num_blocks) for module in (nn.Linear(8, 8), norm(8), nn.ReLU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class logits."""
        return self.blocks(x)


def loss_of(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the cross entropy; the recorder gets this function too, as recommended."""
    return F.cross_entropy(output, batch[1])


def main() -> None:
    """Print one line for each model and training mode."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}")
    print(f"a step with the recorder over one without; median of {ROUNDS} rounds, and without over without")
    cases: list[tuple[str, nn.Module, torch.Tensor]] = [
        ("small CNN, 8 images", SmallNet(), torch.randn(8, 3, 32, 32)),
        ("small transformer, 4 x 64 tokens", SmallTransformer(), torch.randint(1000, (4, 64))),
    ]
    for title, model, x in cases:
        target = torch.randint(10, (len(x),), device=device)
        for way in ("fp32", "fp16 with GradScaler", "fp16 with GradScaler, fused"):
            if way == "fp32" or device.type == "cuda":
                print(f"  {title:<36} {way:<28} {_measure(model.to(device), x.to(device), target, way)}")
    if device.type == "cpu":
        _print_by_size()


def _print_by_size() -> None:
    """Print the time that the recorder adds to a step of models with 3 modules and 4 parameters in each block."""
    print(f"time added to a step; median of the differences of {ROUNDS} rounds, and difference of the least")
    for num_blocks in (1, 16, 150):
        for batch_norm in (False, True):
            arguments = {"num_blocks": num_blocks, "batch_norm": batch_norm}
            torch.manual_seed(0)  # with one seed in ten, 150 norms of 4 samples diverge
            model = Stack(**arguments)
            sizes = [len(list(of)) for of in (model.modules(), model.parameters(), model.buffers())]
            added = _measure_added(model, num_blocks, arguments)
            print("  {:>3} modules, {:>3} parameters, {:>3} buffers".format(*sizes), added)


def _measure_added(model: nn.Module, num_blocks: int, arguments: Mapping[str, Any]) -> str:
    x, target = torch.randn(4, 8), torch.randint(8, (4,))
    inner = max(1, STEPS_A_ROUND // num_blocks)
    with ExitStack() as stack:  # a recorder left open would slow all later measurements
        plain = _make_step(deepcopy(model), x, target, "fp32")
        recorded = _make_step(deepcopy(model), x, target, "fp32", stack=stack, arguments=arguments)
        rows = [[_time(step, x.device, inner) for step in (plain, recorded)] for _ in range(ROUNDS + WARM_UP)]
    rows = rows[WARM_UP:]
    added = statistics.median(with_it - without for without, with_it in rows)
    least, most = min(row[0] for row in rows), min(row[1] for row in rows)
    return f"{1e6 * added:6.0f} us {1e6 * (most - least):6.0f} us  of {1e6 * least:6.0f} us"


def _measure(model: nn.Module, x: torch.Tensor, target: torch.Tensor, way: str) -> str:
    with ExitStack() as stack:
        plain, again = (_make_step(deepcopy(model), x, target, way) for _ in range(2))
        recorded = _make_step(deepcopy(model), x, target, way, stack=stack)
        times = [[_time(step, x.device) for step in (plain, recorded, again)] for _ in range(ROUNDS + WARM_UP)]
        counted = ""
        if x.device.type == "cuda":
            without, with_it = _count_syncs(plain), _count_syncs(recorded)
            counted = f", waits for the device in a step: {without} without, {with_it} with"
    times = times[WARM_UP:]
    ratio = statistics.median(2 * second / (first + third) for first, second, third in times)
    noise = statistics.median(third / first for first, _, third in times)
    return f"{ratio:.3f}  ({noise:.3f} without)  of {1e3 * statistics.median(row[0] for row in times):.1f} ms{counted}"


def _make_step(
    model: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    way: str,
    stack: ExitStack | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Callable[[], None]:
    """Return a training step of this model, with a recorder if a stack is given to close it."""
    device, amp = x.device, way != "fp32"
    optimizer = torch.optim.AdamW(model.parameters(), fused="fused" in way)
    scaler = torch.amp.GradScaler(device.type, enabled=amp)
    recorder = None
    if stack is not None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = {"scaler": scaler if amp else None, "loss": loss_of, "arguments": arguments}
        recorder = stack.enter_context(nandoctor.Recorder(model, folder=folder, **options))

    def step() -> None:
        with torch.autocast(device.type, torch.float16) if amp else nullcontext():
            loss = loss_of(model(x), (x, target))
        if recorder is not None:
            recorder.watch(loss, (x, target))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _time(step: Callable[[], None], device: torch.device, num_steps: int = 1) -> float:
    """Return seconds per step: processor time on a CPU, which excludes other programs; wall time on a GPU."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started = clock()
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock() - started) / num_steps


def _count_syncs(step: Callable[[], None]) -> int:
    """Count how often torch makes the host wait for the device in a step; waits for an event are not counted."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


if __name__ == "__main__":
    main()
