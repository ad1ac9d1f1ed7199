"""Trains a box regressor in fp32, and keeps nothing but the weights when its boxes are NaN, as some detectors do.

What dies: all four weights, in the update of step 70; the file is written by the check in the forward of step 71.
It holds no batch, so nothing can be replayed: what remains to be seen is that the state was lost before that forward.
Why: the loss takes the square root of a squared distance. In the first image without an object the
mask makes that distance exactly 0, and the gradient of sqrt at 0 is Inf times 0. Nothing checks the gradients.
The layout is that of D-FINE's NaN.pth, https://github.com/Peterande/D-FINE/issues/43.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

EXPECTED = {"verdict": "state", "weights": ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias")}
SEED = 0
NUM_STEPS = 500
BATCH_SIZE = 16
NUM_FEATURES = 8


class BoxRegressor(nn.Module):
    """Takes features (batch, 8), gives boxes (batch, 4) as left, top, right, bottom."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


def draw_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features that show a box's corners twice and noisily, the box, and whether there is an object at all."""
    centre, size = torch.rand(BATCH_SIZE, 2), torch.rand(BATCH_SIZE, 2)
    has_object = (torch.rand(BATCH_SIZE, 1) > 0.001).float()
    target = torch.cat([centre - size / 2, centre + size / 2], dim=1) * has_object
    features = target.repeat(1, 2) + 0.05 * torch.randn(BATCH_SIZE, NUM_FEATURES)
    return features, target, has_object


def main(path: Path) -> None:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    model = BoxRegressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(NUM_STEPS):
        features, target, has_object = draw_batch()
        boxes = model(features)
        if not torch.isfinite(boxes).all():
            torch.save({"model": model.state_dict()}, path)
            raise FloatingPointError(f"step {step}: the boxes are not finite; saved to {path}")
        loss = torch.sqrt((((boxes - target) * has_object) ** 2).sum(dim=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".pth"))
    main(parser.parse_args().output)
