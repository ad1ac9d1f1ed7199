"""Trains a classifier with an entropy head on features with heavy tails, until it is certain of a row.

What dies: `entropy` (BinaryEntropy), call 0, at step 112, on sample 9 of the batch, in fp32 as under fp16 autocast.
Why: the logit of that row is 42, and sigmoid is exactly 1 in fp32 from 16.64 on. log(1 - p) is then -inf, and
(1 - p) * log(1 - p) is 0 * -inf. More precision only moves the point where it happens; the fix is another formula.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from nandoctor import cuda_autocast

EXPECTED = {
    "verdict": "numerics",
    "module": "entropy",
    "type": "BinaryEntropy",
    "call": 0,
    "op": "log",
    "cause": "log-of-zero",
    "where": "output",
    "samples": (9,),
    "mode": "train",
}
SEED = 3
NUM_STEPS = 500
BATCH_SIZE = 16
NUM_FEATURES = 8
ENTROPY_WEIGHT = 0.1


class BinaryEntropy(nn.Module):
    """The entropy of a coin that falls heads with probability p, in nats."""

    def forward(self, p: torch.Tensor) -> torch.Tensor:
        return -(p * torch.log(p) + (1 - p) * torch.log(1 - p))


class Classifier(nn.Module):
    """Takes features (batch, 8), gives {"logit": (batch, 1), "entropy": (batch, 1)}."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.entropy = BinaryEntropy()

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        logit = self.layers(features).float()  # a probability in fp16 would saturate even earlier
        return {"logit": logit, "entropy": self.entropy(torch.sigmoid(logit))}


def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of very unlike size; the label is the side of a plane on which a row lies, wrong one time in 20."""
    features = torch.randn(BATCH_SIZE, NUM_FEATURES) * torch.exp(torch.randn(BATCH_SIZE, 1))
    wrong = torch.rand(BATCH_SIZE, 1) < 0.05
    label = (features.sum(dim=1, keepdim=True) > 0) ^ wrong
    return features, label.float()


def main(path: Path) -> None:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(NUM_STEPS):
        features, label = draw_batch()
        with cuda_autocast(torch.float16):
            output = model(features)
            loss = F.binary_cross_entropy_with_logits(output["logit"], label)
            loss = loss + ENTROPY_WEIGHT * output["entropy"].mean()
        if not torch.isfinite(loss):
            arrays = {"features": features.numpy(), "label": label.numpy()}
            arrays |= {name: tensor.detach().numpy() for name, tensor in output.items()}
            torch.save({"state_dict": model.state_dict(), **arrays}, path)
            raise FloatingPointError(f"step {step}: the loss is not finite; saved to {path}")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  largest logit {output['logit'].max():.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".pth"))
    main(parser.parse_args().output)
