"""Measure the anonymous memory (RssAnon) of a replay on models of 0.3 to 2.2 billion parameters.

`python benchmarks/memory.py [BILLIONS...] [--dtype float32|bfloat16]` prints the peak of each way to replay, the limit
of 1 GB + four times the largest layer, and the slope in bytes per parameter. Weights are random. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WIDTH = 2048
LARGEST = 4 * WIDTH * WIDTH
WAYS = {
    "diagnosis": {"fixes": False},
    "with a loss": {"fixes": False, "loss": "memory.py:loss"},
    "with fixes": {"max_trials": 12},
}
ROW = "{:<12}{:>14}" + "{:>14}" * len(WAYS)


def anonymous_memory() -> int:
    """Return the bytes of this process that no file backs: what it has allocated and written to."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10


class Block(nn.Module):
    """A norm and a feed-forward network with a residual: (N, L, WIDTH) to (N, L, WIDTH)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the network's output for the normed input."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, and a head whose product overflows fp16."""

    def __init__(self, layers: int = 2, dtype: str = "float32") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(getattr(torch, dtype)) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 8, dtype=getattr(torch, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, L, WIDTH) to (N, L, 8)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x * 1e4) * 1e3


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean square, as something to differentiate."""
    return output.square().mean()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("billions", nargs="*", type=float, default=[0.3, 0.6, 1.1, 2.2])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        path, layers, way = given.measure
        measure(Path(path), int(layers), given.dtype, way)
        return 0
    limit = 1e9 + 4 * LARGEST * 4
    print(f"peak of anonymous memory in MB, {given.dtype}; limit {limit / 1e6:.0f} MB")
    print(ROW.format("parameters", "file MB", *WAYS))
    peaks: list[tuple[int, list[float]]] = []
    for billions in given.billions:
        layers = max(round(billions * 1e9 / (2 * LARGEST)), 1)
        with tempfile.TemporaryDirectory() as folder:
            path = write_dump(Path(folder) / "dump.pth", layers, given.dtype)
            found = [start(path, layers, given.dtype, way) for way in WAYS]
            size = f"{path.stat().st_size / 1e6:.0f}"
        peaks.append((2 * LARGEST * layers, found))
        print(ROW.format(f"{billions:g} B", size, *(f"{peak / 1e6:.0f}" for peak in found)), flush=True)
    if len(peaks) > 1:
        (few, before), (many, after) = peaks[0], peaks[-1]
        slopes = [(late - early) / (many - few) for early, late in zip(before, after, strict=True)]
        print(ROW.format("bytes each", "", *(f"{slope:.2f}" for slope in slopes)))
    return 1 if any(peak > limit for _, found in peaks for peak in found) else 0


def write_dump(path: Path, layers: int, dtype: str) -> Path:
    """Write a dump whose weights all start with the same small random numbers; return its path."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Stack(layers).state_dict().items()}
    noise = (torch.randn(LARGEST) * 0.02).to(getattr(torch, dtype))
    state = {name: noise[: shape.numel()].view(shape).clone() for name, shape in shapes.items()}
    torch.save({"state_dict": state, "x": torch.randn(2, 8, WIDTH), "logit": torch.full((2, 8, 8), torch.inf)}, path)
    return path


def start(path: Path, layers: int, dtype: str, way: str) -> float:
    """Return the peak of one replay in its own process, in bytes."""
    command = [sys.executable, __file__, "--dtype", dtype, "--measure", str(path), str(layers), way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.split()[-1])


def measure(path: Path, layers: int, dtype: str, way: str) -> None:
    """Replay, and print the verdict, the cause and the peak of anonymous memory in bytes."""
    import nandoctor

    options = dict(WAYS[way])
    if "loss" in options:
        options["loss"] = loss
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_memory())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    arguments = {"layers": layers, "dtype": dtype}
    case = nandoctor.replay(path, Stack, model_args=arguments, mode="eval", output="logit", **options)
    done.set()
    watcher.join()
    print(case.verdict, case.cause.code if case.cause else None, peak[0])


if __name__ == "__main__":
    raise SystemExit(main())
