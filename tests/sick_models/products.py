"""Products that pass 65504: linear layers, convolutions, attention scores, einsum.

In: nothing. Out: `CASES` of the row "product too large".
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, case, randn, scaled, seeded


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
    """Token ids [batch, length] -> (hidden, logits)."""

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


class PatchAttention(nn.Module):
    """Multiplies first and scales later, as many a first draft does."""

    def __init__(self, width: int, *, scale_first: bool) -> None:
        super().__init__()
        self.query = scaled(nn.Linear(width, width), 160.0)
        self.key = scaled(nn.Linear(width, width), 160.0)
        self.value = nn.Linear(width, width)
        self.scale_first = scale_first

    def forward(self, x: Tensor) -> Tensor:
        scale = x.shape[-1] ** -0.5
        before, after = (scale, 1.0) if self.scale_first else (1.0, scale)
        scores = (before * self.query(x)) @ self.key(x).transpose(-2, -1) * after
        return scores.softmax(dim=-1) @ self.value(x)


class PatchEncoder(nn.Module):
    """Images [batch, 3, 16, 16] in a dict -> {"logit": [batch, 5]}."""

    def __init__(self, *, scale_first: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, stride=4)
        self.norm = nn.LayerNorm(64)
        self.attend = PatchAttention(64, scale_first=scale_first)
        self.head = nn.Linear(64, 5)

    def forward(self, inputs: Batch) -> Batch:
        x = self.patches(inputs["image"]).flatten(2).transpose(1, 2)
        x = x + self.attend(self.norm(x))
        return {"logit": self.head(x.mean(dim=1))}


@dataclass
class Detection:
    boxes: Tensor
    scores: Tensor


class Pyramid(nn.Module):
    """Two levels of features; the coarse one is loud but fits, and its norm has NaN statistics that nobody reads."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.bottom = nn.Sequential(scaled(nn.Conv2d(3, 16, 3, padding=1), 300.0), nn.ReLU())
        self.top = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU())
        self.lateral = scaled(nn.Conv2d(16, 16, 1), gain)
        self.smooth = nn.BatchNorm2d(16)
        self.loud = scaled(nn.Conv2d(16, 16, 1), 100.0)
        self.quiet = nn.BatchNorm2d(16)
        assert self.quiet.running_var is not None
        self.quiet.running_var.fill_(float("nan"))

    def forward(self, image: Tensor) -> list[Tensor]:
        fine = self.bottom(image)
        coarse = self.top(fine)
        return [self.smooth(self.lateral(fine)), self.quiet(self.loud(coarse))]


class Detector(nn.Module):
    """Images [batch, 3, 16, 16] -> `Detection`."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.neck = Pyramid(gain)
        self.boxes = nn.Conv2d(16, 4, 1)
        self.scores = nn.Conv2d(16, 3, 1)

    def forward(self, image: Tensor) -> Detection:
        levels = [level.flatten(2) for level in self.neck(image)]
        joined = torch.cat(levels, dim=-1).unsqueeze(-1)
        return Detection(boxes=self.boxes(joined), scores=self.scores(joined))


class Retrieval(nn.Module):
    """Queries against keys without normalisation; no passage answers the question that it was taken from."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.ask = scaled(nn.Linear(12, 48), gain)
        self.answer = scaled(nn.Linear(20, 48), gain)

    def forward(self, *, question: Tensor, passage: Tensor) -> Tensor:
        similarity = torch.einsum("qd,pd->qp", self.ask(question), self.answer(passage))
        itself = torch.eye(*similarity.shape, dtype=torch.bool, device=similarity.device)
        return similarity.masked_fill(itself, -torch.inf).softmax(dim=-1)


CASES = (
    case(
        "product/decoder-feed-forward",
        seeded(Decoder, gain=200.0),
        lambda: {"tokens": torch.arange(24).view(2, 12)},
        "precision layers.1.feed.down linear matmul-overflow",
        line="self.down(F.gelu(self.up(x)))",
        repair={"build": seeded(Decoder, gain=1.0)},
    ),
    case(
        "product/patch-attention-scores",
        seeded(PatchEncoder, scale_first=False),
        lambda: {"image": randn(2, 3, 16, 16)},
        "precision attend matmul matmul-overflow",
        line="(before * self.query(x)) @ self.key(x)",
        repair={"build": seeded(PatchEncoder, scale_first=True)},
    ),
    case(
        "product/detector-lateral",
        seeded(Detector, gain=700.0),
        lambda: {"image": 3.0 * randn(2, 3, 16, 16)},
        "precision neck.lateral conv2d matmul-overflow",
        line="self.smooth(self.lateral(fine))",
        repair={"build": seeded(Detector, gain=1.0)},
    ),
    case(
        "product/retrieval-einsum",
        seeded(Retrieval, gain=400.0),
        lambda: {"question": randn(5, 12), "passage": randn(7, 20, seed=1)},
        "precision . einsum matmul-overflow",
        call=lambda model, batch: model(**batch),
        line='torch.einsum("qd,pd->qp"',
        repair={"build": seeded(Retrieval, gain=1.0)},
    ),
)
