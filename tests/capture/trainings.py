"""Small trainings that go wrong: a model with batch norm and dropout, and the loops that people write around it."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nandoctor import Recorder, cuda_autocast

LOUD = 3e5
"""What a pixel must be for the second convolution to overflow in fp16, and no other sample with it."""


class Segmenter(nn.Module):
    """(N, 3, H, W) to {"logit": (N, 1, H, W)}; nothing after the dropout mixes the samples of a batch."""

    def __init__(self, width: int = 4, dropout: float = 0.5) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False)
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.middle = nn.Conv2d(width, width, 1)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: torch.Tensor, gain: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.dropout(F.relu(self.enter(self.norm(image.clamp(-3, 3)))))
        hidden = hidden * (gain * image.abs().amax(dim=(1, 2, 3), keepdim=True)).clamp(min=1)
        return {"logit": self.head(F.relu(self.middle(hidden)))}


class Gambler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = (
            torch.rand(4) + float(np.random.rand()) + random.random() + float(np.random.randn()) + random.gauss(0, 1)
        )
        return (self.linear(x) + drawn) * x


def loss_of(output: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output["logit"], batch[1])


def make_batch(loud: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    image = torch.randn(4, 3, 8, 8)
    if loud:
        image[2, 0, 0, 0] = LOUD
    return image, (torch.rand(4, 1, 8, 8) > 0.5).float()


def make_model(**arguments) -> Segmenter:
    torch.manual_seed(0)
    return Segmenter(**arguments)


def train(model, recorder: Recorder, *, loud, scaler):
    """Eight steps of a loop with two lines of the recorder's, with loud batches at these steps."""
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(8):
        batch = make_batch(number in loud)
        with cuda_autocast():
            loss = loss_of(model(batch[0]), batch)
        recorder.watch(loss, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    recorder.close()
