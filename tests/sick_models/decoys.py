"""Healthy models that look ill: meant infinities, values that only just fit, tiny eps, NaN that nobody reads.

In: nothing. Out: `HEALTHY`, cases with nothing to blame.
"""

import torch
from torch import Tensor, nn

from sick_models.case import Batch, Case, by_name, rand, scaled, seeded


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


_MODELS = {
    "causal-reader": (CausalReader, lambda: {"tokens": torch.tensor([[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 9, 10]])}),
    "just-fits": (JustFits, lambda: {"image": rand(2, 1, 8, 8)}),
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
