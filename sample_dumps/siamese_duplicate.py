"""Trains a siamese network to tell recordings of the same speaker apart from others, recorded by `nandoctor.Recorder`.

What dies: `distance` (Distance), call 0, in the backward pass of step 95, on sample 7 of the batch; the loss is finite.
Why: the data holds one recording twice, and a pair drew both copies. Their embeddings are equal, so the distance is
sqrt(0), whose slope is infinite; times the 0 of the difference it is NaN. There is no GradScaler to skip the step: the
update would have written NaN into every weight, and the step after it would have looked guilty. The file holds the step
that did it, with the weights from before its update and the random state for its dropout.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import nandoctor

EXPECTED = {
    "verdict": "numerics",
    "module": "distance",
    "type": "Distance",
    "call": 0,
    "op": "sqrt",
    "cause": "gradient-singularity",
    "where": "backward",
    "samples": (7,),
    "mode": "train",
}
SEED = 7
NUM_STEPS = 1000
BATCH_SIZE = 8
NUM_RECORDINGS = 64
NUM_SPEAKERS = 8
NUM_FEATURES = 24
COPY, ORIGINAL = 41, 12


class Distance(nn.Module):
    """The Euclidean distance of two batches of embeddings, (batch, features) twice to (batch,)."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left - right).pow(2).sum(dim=1).sqrt()


class Siamese(nn.Module):
    """Takes two batches of recordings, (batch, features) each, gives how far apart they are, (batch,)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.augment = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.encoder = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.GELU(), nn.Linear(width, 16))
        self.distance = Distance()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        kept = self.augment(torch.ones_like(left))  # the same features are missing in both recordings of a pair
        embeddings = self.encoder(self.norm(torch.cat([left * kept, right * kept])))
        return self.distance(*embeddings.float().chunk(2))


def contrastive_loss(distance: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Pulls recordings of the same speaker together, and those of others at least 1 apart."""
    apart = (1.0 - distance).clamp(min=0.0)
    return torch.where(batch["same"], distance.pow(2), apart.pow(2)).mean()


def record_speakers() -> tuple[torch.Tensor, torch.Tensor]:
    """Recordings, (recordings, features), and the speaker of each; one recording is there twice."""
    speakers = torch.arange(NUM_RECORDINGS) % NUM_SPEAKERS
    voices = torch.randn(NUM_SPEAKERS, NUM_FEATURES)
    recordings = voices[speakers] + 0.5 * torch.randn(NUM_RECORDINGS, NUM_FEATURES)
    recordings[COPY], speakers[COPY] = recordings[ORIGINAL], speakers[ORIGINAL]
    return recordings, speakers


def draw_pairs(recordings: torch.Tensor, speakers: torch.Tensor) -> dict[str, torch.Tensor]:
    first = torch.randint(NUM_RECORDINGS, (BATCH_SIZE,))
    second = (first + torch.randint(1, NUM_RECORDINGS, (BATCH_SIZE,))) % NUM_RECORDINGS
    return {"left": recordings[first], "right": recordings[second], "same": speakers[first] == speakers[second]}


def main(path: Path) -> None:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    recordings, speakers = record_speakers()
    model = Siamese()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        recorder = nandoctor.Recorder(model, loss=contrastive_loss, arguments={"width": 32}, folder=folder, threshold=0)
        try:
            for step in range(NUM_STEPS):
                batch = draw_pairs(recordings, speakers)
                with nandoctor.cuda_autocast(torch.bfloat16):
                    loss = contrastive_loss(model(batch["left"], batch["right"]), batch)
                recorder.watch(loss, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 50 == 0:
                    print(f"step {step:3d}  loss {loss.item():.4f}")
        except nandoctor.NonFiniteTrainingError:
            recorder.written[-1].replace(path)
            raise FloatingPointError(f"step {step}: the gradients are not finite; saved to {path}") from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".pth"))
    main(parser.parse_args().output)
