"""Trains a small transformer to forecast sales, on raw counts and with the attention scores scaled too late.

What dies: `blocks.0.attention` (Attention), call 0, at step 38, on sample 6 of the batch, under fp16 autocast only.
It shows as NaN on the way into `blocks.0.attention.project`: the Inf before it lives and dies in `Attention.forward`.
Why: the scores are divided by sqrt(16) after q @ k has been rounded to fp16. A store that sells 115 a day would have
had products up to 3.5e3 under the first weights; by step 38 these have grown, the products are 2.1e5, fp16 makes them
Inf, and softmax makes inf - inf of those. Scaled before the product they would have reached 5.4e4 and fitted.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from nandoctor import cuda_autocast

EXPECTED = {
    "verdict": "precision",
    "module": "blocks.0.attention",
    "type": "Attention",
    "call": 0,
    "op": "matmul",
    "cause": "matmul-overflow",
    "where": "between",
    "samples": (6,),
    "mode": "train",
}
SEED = 28
NUM_STEPS = 200
BATCH_SIZE = 8
NUM_DAYS = 28
LEARNING_RATE = 0.01


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        size = width // self.num_heads
        q, k, v = self.query_key_value(x).view(batch, length, 3, self.num_heads, size).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        weights = torch.softmax(scores / math.sqrt(size), dim=-1)
        return self.project((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Forecaster(nn.Module):
    """Takes sales (batch, days), gives (logit (batch, 1), hidden (batch, days, width))."""

    def __init__(self, width: int = 32, num_heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.position = nn.Parameter(torch.randn(NUM_DAYS, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.head = nn.Linear(width, 1)

    def forward(self, sales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.blocks(self.embed(sales[..., None]) + self.position)
        return self.head(hidden[:, -1]), hidden


def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Daily sales of stores, most of them small, and whether the next day sells more than the last."""
    mean = torch.exp(1.0 + torch.randn(BATCH_SIZE, 1))
    week = 1 + 0.5 * torch.sin(2 * torch.pi * (torch.arange(NUM_DAYS + 1) / 7 + torch.rand(BATCH_SIZE, 1)))
    sales = torch.poisson(mean * week)
    return sales[:, :-1], (sales[:, -1:] > sales[:, -2:-1]).float()


def main(path: Path) -> None:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(NUM_STEPS):
        sales, label = draw_batch()
        with cuda_autocast(torch.float16):
            logit, _ = model(sales)
            loss = F.binary_cross_entropy_with_logits(logit, label)
        if not torch.isfinite(logit).all():
            arrays = {"sales": sales.numpy(), "label": label.numpy(), "logit": logit.detach().numpy()}
            torch.save({"state_dict": model.state_dict(), **arrays}, path)
            raise FloatingPointError(f"step {step}: the logit is not finite; saved to {path}")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  loss scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".pth"))
    main(parser.parse_args().output)
