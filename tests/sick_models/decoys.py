"""Healthy models that look ill: meant infinities, values that only just fit, tiny eps, NaN that nobody reads.

In: nothing. Out: `HEALTHY`, cases with nothing to blame.
"""

import torch
from torch import Tensor, nn

from sick_models.case import Batch, Case, by_name, rand, randn, scaled, seeded


class CausalReader(nn.Module):
    """Partial -inf masks, causal and padding, in attention by hand and in torch's own layer."""

    causal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.register_buffer("causal", torch.full((6, 6), float("-inf")).triu(1))
        self.qk = nn.Linear(12, 24)
        self.layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key = self.qk(x).chunk(2, dim=-1)
        scores = (query @ key.transpose(-2, -1) + self.causal).masked_fill((tokens == 0)[:, None, :], -torch.inf)
        x = x + scores.softmax(dim=-1) @ x
        return self.head(self.layer(x, src_mask=self.causal))


class LogOrZero(nn.Module):
    """torch.where hides the logarithm of zero, on a value that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 8)

    def forward(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        logarithm = torch.where(counts > 0, torch.log(counts), 0.0)
        return self.entry(logarithm), logarithm


class JustFits(nn.Module):
    """Values of 5e4 that fit, and a product of 1e5 that a clamp is meant to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = scaled(nn.Conv2d(1, 4, 3), 4e4)
        self.drive = scaled(nn.Conv2d(1, 4, 3), 1000.0)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, inputs: Batch) -> Batch:
        image = inputs["image"]
        clipped = (self.drive(image) * 1000.0).clamp(-1.0, 1.0)
        return {"map": self.head(self.norm(torch.cat([self.loud(image), clipped], dim=1)))}


class TinyEps(nn.Module):
    """eps of 1e-12 and 1e-8 under ops that autocast runs in fp32, on a row that is all zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 10, bias=False)
        self.norm = nn.LayerNorm(10, eps=1e-12)
        self.head = nn.Linear(20, 2)

    def forward(self, table: Tensor) -> Tensor:
        x = self.body(table)
        power = x.square().sum(dim=-1, keepdim=True)
        unit = x / torch.sqrt(power + 1e-8)
        return self.head(torch.cat([self.norm(x), unit], dim=-1))


class UnreadBuffers(nn.Module):
    """Batch norms poisoned by an earlier step: in train mode nobody reads the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 3))
        norm = self.body[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_var is not None
        norm.running_var.fill_(float("nan"))

    def forward(self, wave: Tensor) -> Tensor:
        return self.body(wave)


class Holes(nn.Module):
    """Measurements with NaN for "missing", which the model replaces before it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.LSTM(6, 10, batch_first=True)
        self.head = nn.Linear(10, 1)

    def forward(self, series: Tensor) -> Tensor:
        missing = series.isnan()
        filled = torch.cat([torch.where(missing, 0.0, series), missing.to(series.dtype)], dim=-1)
        return self.head(self.read(filled)[0][:, -1])


class TopScores(nn.Module):
    """-inf as the start of a running maximum, +inf as "no distance yet"."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(7, 4)

    def forward(self, items: Tensor) -> dict[str, Tensor]:
        scores = self.score(items)
        best = scores.new_full(scores.shape[:1] + scores.shape[2:], float("-inf"))
        nearest = torch.full_like(best, float("inf"))
        for step in range(scores.shape[1]):
            best = torch.maximum(best, scores[:, step])
            nearest = torch.minimum(nearest, scores[:, step].abs())
        return {"best": best, "nearest": nearest}


class ProtectedScores(nn.Module):
    """Attention scores of 1e5, in a region that the author took out of CUDA's autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = scaled(nn.Linear(8, 32), 500.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.qk(x).chunk(2, dim=-1)
        with torch.autocast("cuda", enabled=False):
            weights = (query.float() @ key.float().transpose(-2, -1) * 1e-5).softmax(dim=-1)
        return self.head(weights @ x)


class Masterpiece(nn.Module):
    """A plain network with nothing special: a false alarm here has no excuse."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(self.stem(image)))


def series_with_holes() -> Batch:
    series = randn(2, 8, 3)
    series[0, 2, 1] = float("nan")
    return {"series": series}


def table_with_a_zero_row() -> Batch:
    table = randn(4, 6)
    table[3] = 0.0
    return {"table": table}


_MODELS = {
    "causal-reader": (CausalReader, lambda: {"tokens": torch.tensor([[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 9, 10]])}),
    "log-or-zero": (
        LogOrZero,
        lambda: {"counts": torch.tensor([[0.0, 1.0, 5.0, 2.0, 0.0], [3.0, 0.0, 7.0, 1.0, 9.0]])},
    ),
    "just-fits": (JustFits, lambda: {"image": rand(2, 1, 8, 8)}),
    "tiny-eps": (TinyEps, table_with_a_zero_row),
    "unread-buffers": (UnreadBuffers, lambda: {"wave": randn(3, 2, 20)}),
    "holes": (Holes, series_with_holes),
    "top-scores": (TopScores, lambda: {"items": randn(2, 5, 7)}),
    "protected-scores": (ProtectedScores, lambda: {"x": randn(2, 6, 8)}),
    "masterpiece": (Masterpiece, lambda: {"image": randn(4, 3, 8, 8)}),
}
"""What is built, and its batch."""

HEALTHY = tuple(
    Case(
        name=f"decoy/{name}",
        mechanism="healthy decoy",
        verdict="healthy",
        build=seeded(kind),
        batch=batch,
        call=by_name(seeded(kind)),
    )
    for name, (kind, batch) in _MODELS.items()
)
