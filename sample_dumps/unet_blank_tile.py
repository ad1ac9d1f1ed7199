"""Trains a small U-Net to find cells in microscope tiles, until a tile without a single cell comes by.

What dies: `norm` (ChannelNorm), call 1, at step 37, on sample 2 of the batch, under fp16 autocast only.
Why: a tile without cells is blank, so its variance is 0 in every channel, and only the 1e-8 stands between 0 and 0/0.
Call 0 of the same module sees the fp32 image, where 1e-8 is a number. Call 1 sees the first convolution's output:
neither var nor add is on autocast's fp32 list, so 1e-8 rounds to 0 (fp16 ends at 6e-8) and the blank tile becomes NaN.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from nandoctor import cuda_autocast

EXPECTED = {
    "verdict": "precision",
    "module": "norm",
    "type": "ChannelNorm",
    "call": 1,
    "op": "div",
    "cause": "eps-underflow",
    "where": "output",
    "samples": (2,),
    "mode": "train",
}
SEED = 43
NUM_STEPS = 200
BATCH_SIZE = 4
TILE_SIZE = 32
CELLS_PER_TILE = 5.0
WHITE = 1.0


class ChannelNorm(nn.Module):
    """Brings each channel of each image to zero mean and unit variance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=(2, 3), keepdim=True)
        variance = x.var(dim=(2, 3), keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + 1e-8)


class UNet(nn.Module):
    """Takes {"image": (batch, 3, height, width)}, gives {"logit": (batch, 1, height, width)}."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = ChannelNorm()  # without weights, so one serves every layer
        self.down1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.down2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.bottom = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False)
        self.up2 = nn.Conv2d(4 * width, width, 3, padding=1, bias=False)
        self.up1 = nn.Conv2d(2 * width, width, 3, padding=1, bias=False)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, input_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        image = self.norm(input_dict["image"])
        high = F.relu(self.norm(self.down1(image)))
        middle = F.relu(self.norm(self.down2(F.max_pool2d(high, 2))))
        x = F.relu(self.norm(self.bottom(F.max_pool2d(middle, 2))))
        x = F.relu(self.norm(self.up2(torch.cat([F.interpolate(x, scale_factor=2), middle], dim=1))))
        x = F.relu(self.norm(self.up1(torch.cat([F.interpolate(x, scale_factor=2), high], dim=1))))
        return {"logit": self.head(x)}


def draw_tile() -> tuple[torch.Tensor, torch.Tensor]:
    """A white tile with a random number of stained cells, (3, size, size), and where they are, (1, size, size)."""
    image = torch.full((3, TILE_SIZE, TILE_SIZE), WHITE)
    mask = torch.zeros(1, TILE_SIZE, TILE_SIZE)
    rows, columns = torch.meshgrid(torch.arange(TILE_SIZE), torch.arange(TILE_SIZE), indexing="ij")
    for _ in range(int(torch.poisson(torch.tensor(CELLS_PER_TILE)))):
        row, column = torch.randint(TILE_SIZE, (2,))
        radius = torch.randint(2, 6, ())
        cell = (rows - row) ** 2 + (columns - column) ** 2 <= radius**2
        stain = torch.tensor([0.55, 0.35, 0.65])[:, None, None] + 0.1 * torch.randn(3, TILE_SIZE, TILE_SIZE)
        image = torch.where(cell, stain, image)
        mask[:, cell] = 1.0
    return image, mask


def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
    images, masks = zip(*(draw_tile() for _ in range(BATCH_SIZE)), strict=True)
    return torch.stack(images), torch.stack(masks)


def main(path: Path) -> None:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(NUM_STEPS):
        image, mask = draw_batch()
        with cuda_autocast(torch.float16):
            logit = model({"image": image})["logit"]
            loss = F.binary_cross_entropy_with_logits(logit, mask)
        if not torch.isfinite(logit).all():
            arrays = {"image": image.numpy(), "mask": mask.numpy(), "logit": logit.detach().numpy()}
            torch.save({"state_dict": model.state_dict(), **arrays}, path)
            raise FloatingPointError(f"step {step}: the logit is not finite; saved to {path}")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  loss scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".pth"))
    main(parser.parse_args().output)
