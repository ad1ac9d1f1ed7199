"""Products that pass 65504: a linear layer of a decoder.

In: nothing. Out: `CASES` of the row "product too large".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import case, scaled, seeded


class CausalMix(nn.Module):
    """Causal attention written by hand: its partial -inf mask is innocent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return self.out(scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value)


class FeedForward(nn.Module):
    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.up = scaled(nn.Linear(width, 4 * width), 10 * gain)
        self.down = scaled(nn.Linear(4 * width, width), gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.norm_a = nn.LayerNorm(width, eps=1e-12)
        self.mix = CausalMix(width)
        self.norm_b = nn.LayerNorm(width, eps=1e-12)
        self.feed = FeedForward(width, gain)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm_a(x))
        return x + self.feed(self.norm_b(x))


class Decoder(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layers = nn.ModuleList([DecoderLayer(32, 1.0), DecoderLayer(32, gain), DecoderLayer(32, 1.0)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 40)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        hidden = self.norm(x)
        return hidden, self.head(hidden)


CASES = (
    case(
        "product/decoder-feed-forward",
        seeded(Decoder, gain=200.0),
        lambda: {"tokens": torch.arange(24).view(2, 12)},
        "precision layers.1.feed.down linear matmul-overflow",
        line="self.down(F.gelu(self.up(x)))",
        repair={"build": seeded(Decoder, gain=1.0)},
    ),
)
