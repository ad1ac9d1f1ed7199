"""Trains a small convolutional classifier, with one 16-bit image among the 8-bit ones, and validates every 40 steps.

What dies: the buffers of `blocks.0.norm` (BatchNorm2d), call 0: the validation after step 39 is NaN on every sample, in
fp32 as under fp16 autocast. No weight is at fault, and in train mode the model is sound.
Why: the loader scales 8-bit pixels to 0..1 and leaves all others as they are. At step 17 an overexposed pixel of 65535
becomes Inf in the cast to fp16. GradScaler skips that step, so the weights stay clean; BatchNorm has already put Inf
into its running statistics, where it stays, and only eval mode reads them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nandoctor import cuda_autocast

EXPECTED = {
    "verdict": "state",
    "module": "blocks.0.norm",
    "type": "BatchNorm2d",
    "call": 0,
    "op": None,
    "cause": "poisoned-buffers",
    "where": "output",
    "samples": (0, 1, 2, 3, 4, 5, 6, 7),
    "mode": "eval",
}
SEED = 0
NUM_STEPS = 200
STEPS_BETWEEN_VALIDATIONS = 40
BATCH_SIZE = 8
IMAGE_SIZE = 16
DEEP_IMAGE = 141  # the only one that was stored with 16 bits per pixel


class ConvBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


class Classifier(nn.Module):
    """Takes image (batch, 1, height, width), gives the logit (batch, 1)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(1, width), ConvBlock(width, 2 * width), ConvBlock(2 * width, 2 * width))
        self.head = nn.Linear(2 * width, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(image).mean(dim=(2, 3)))


def read_file(index: int) -> tuple[np.ndarray, float]:
    """The star in the image of that number, (height, width), and its label: whether it is a bright one."""
    rng = np.random.default_rng(index)
    row, column = rng.integers(4, IMAGE_SIZE - 4, size=2)
    rows, columns = np.mgrid[:IMAGE_SIZE, :IMAGE_SIZE]
    brightness = rng.uniform(0.6, 1.0) if index != DEEP_IMAGE else 1.0
    scene = brightness * np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 8)
    dtype = np.uint16 if index == DEEP_IMAGE else np.uint8
    return (scene * np.iinfo(dtype).max).astype(dtype), float(brightness > 0.8)


def to_tensor(pixels: np.ndarray) -> torch.Tensor:
    """As torchvision's ToTensor: bytes are scaled to 0..1, other types are left as they are."""
    image = torch.from_numpy(pixels.astype(np.float32))[None]
    return image / 255 if pixels.dtype == np.uint8 else image


def load_batch(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    files = [read_file(index) for index in range(first, first + BATCH_SIZE)]
    return torch.stack([to_tensor(pixels) for pixels, _ in files]), torch.tensor([[label] for _, label in files])


def validate(model: Classifier, step: int, path: Path) -> None:
    image, label = load_batch(1_000_000)
    model.eval()
    with torch.no_grad(), cuda_autocast(torch.float16):
        logit = model(image)
    model.train()
    if not torch.isfinite(logit).all():
        arrays = {"image": image.numpy(), "label": label.numpy(), "logit": logit.numpy()}
        torch.save({"state_dict": model.state_dict(), **arrays}, path)
        raise FloatingPointError(f"validation after step {step}: the logit is not finite; saved to {path}")


def main(path: Path) -> None:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(NUM_STEPS):
        image, label = load_batch(step * BATCH_SIZE)
        with cuda_autocast(torch.float16):
            loss = F.binary_cross_entropy_with_logits(model(image), label)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 9 or not torch.isfinite(loss):
            print(f"step {step:3d}  loss {loss.item():.4f}  loss scale {scaler.get_scale():.0f}")
        if (step + 1) % STEPS_BETWEEN_VALIDATIONS == 0:
            validate(model, step, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".pth"))
    main(parser.parse_args().output)
