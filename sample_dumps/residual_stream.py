"""Trains a deep residual network whose stream nothing holds, with a one-cycle schedule that peaks too high.

What dies: `blocks.23` (Block), call 0, at step 61, on sample 12 of the batch, under fp16 autocast only.
Why: the stream holds 5.1e4 and the last branch adds 2.5e4. Each fits into fp16, the sum in `Block.forward` does not, so
`x + branch(x)` is Inf and none of the block's own layers is at fault. The final LayerNorm divides the stream's size out
again: the loss never sees it grow, and no gradient holds it back.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from nandoctor import cuda_autocast

EXPECTED = {
    "verdict": "precision",
    "module": "blocks.23",
    "type": "Block",
    "call": 0,
    "op": "add",
    "cause": "elementwise-overflow",
    "where": "output",
    "samples": (12,),
    "mode": "train",
}
SEED = 12
NUM_STEPS = 400
BATCH_SIZE = 16
NUM_FEATURES = 8
LEARNING_RATE = 0.05


@dataclass
class Prediction:
    """Class scores, (batch, classes), and the last state of the stream, (batch, width)."""

    logit: torch.Tensor
    stream: torch.Tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.contract(F.relu(self.expand(x)))


class ResidualNetwork(nn.Module):
    """Takes features (batch, 8), gives a `Prediction` of four classes."""

    def __init__(self, width: int = 16, depth: int = 24) -> None:
        super().__init__()
        self.stem = nn.Linear(NUM_FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, features: torch.Tensor) -> Prediction:
        stream = self.stem(features)
        for block in self.blocks:
            stream = block(stream)
        return Prediction(self.head(self.norm(stream)), stream)


def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Points around the origin; the class is the number of positive products of neighbouring features, modulo 4."""
    features = torch.randn(BATCH_SIZE, NUM_FEATURES)
    label = (features * features.roll(1, dims=1) > 0).sum(dim=1) % 4
    return features, label


def main(path: Path) -> None:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    model = ResidualNetwork()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=NUM_STEPS)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(NUM_STEPS):
        features, label = draw_batch()
        with cuda_autocast(torch.float16):
            prediction = model(features)
            loss = F.cross_entropy(prediction.logit, label)
        if not torch.isfinite(prediction.logit).all():
            arrays = {"features": features.numpy(), "label": label.numpy(), "logit": prediction.logit.detach().numpy()}
            torch.save({"state_dict": model.state_dict(), **arrays}, path)
            raise FloatingPointError(f"step {step}: the logit is not finite; saved to {path}")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  stream absmax {prediction.stream.abs().max():.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".pth"))
    main(parser.parse_args().output)
