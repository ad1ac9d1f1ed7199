"""A small constant that fp16 rounds to zero: log 0.

In: nothing. Out: `CASES` of the row "eps lost".
"""

import torch
from torch import Tensor, nn

from sick_models.case import Batch, case, randn, seeded


class LogBands(nn.Module):
    """log(energy + eps) of a filter bank: digital silence has no energy at all."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.bank = nn.Conv1d(1, 8, 20, stride=10, bias=False)
        self.eps = eps

    def forward(self, audio: Tensor) -> Tensor:
        energy = self.bank(audio).abs()
        return torch.log(energy + self.eps)


class Listener(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.bands = LogBands(eps)
        self.read = nn.LSTM(8, 10, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, audio: Tensor) -> tuple[Tensor, Tensor]:
        bands = self.bands(audio)
        centred = bands - bands.mean(dim=-1, keepdim=True)
        states, _last = self.read(centred.transpose(1, 2))
        return self.head(states[:, -1]), bands


def with_silence() -> Batch:
    audio = randn(2, 1, 200)
    audio[0, :, 60:140] = 0.0
    return {"audio": audio}


CASES = (
    case(
        "eps/digital-silence",
        seeded(Listener, eps=1e-8),
        with_silence,
        "precision bands log eps-underflow",
        line="torch.log(energy + self.eps)",
        repair={"build": seeded(Listener, eps=1e-5)},
    ),
)
