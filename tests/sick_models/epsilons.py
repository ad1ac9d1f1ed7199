"""Small constants that fp16 rounds to zero or absorbs: 0/0, log 0, rsqrt 0.

In: nothing. Out: `CASES` of the row "eps lost".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, biased, case, randn, seeded


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
    """Audio [batch, 1, 200] -> (logits, bands)."""

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


class ReluAttention(nn.Module):
    """Attention whose weights are relu(q) . relu(k), divided by their sum: all of them can be zero."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.qkv = biased(nn.Linear(width, 3 * width), -30.0, unit=slice(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        query, key = F.relu(query), F.relu(key)
        context = key.transpose(-2, -1) @ value / x.shape[1]
        total = query @ key.mean(dim=1).unsqueeze(-1)
        return (query @ context) / (total + self.eps)


class DenseDepth(nn.Module):
    """Images [batch, 3, 12, 12] -> depth at a quarter of the size; eps 1e-12 of the LayerNorm is harmless in fp32."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.norm = nn.LayerNorm(12, eps=1e-12)
        self.mix = ReluAttention(12, eps)
        self.depth = nn.Linear(12, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        return F.softplus(self.depth(x + self.mix(self.norm(x)))).squeeze(-1)


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
    case(
        "eps/relu-attention",
        seeded(DenseDepth, eps=1e-12),
        lambda: {"image": randn(2, 3, 12, 12)},
        "precision mix div eps-underflow",
        line="(query @ context) / (total + self.eps)",
        repair={"build": seeded(DenseDepth, eps=1e-4)},
    ),
)
