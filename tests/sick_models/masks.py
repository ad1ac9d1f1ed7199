"""Masks that go wrong: constants that fp16 cannot hold, rows with every key masked.

In: nothing. Out: `CASES` of the rows "mask constant" and "full mask row".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, case, randn, seeded


class TwoMasks(nn.Module):
    """Cross-attention under two masks, each of which adds the lowest value of fp32."""

    def __init__(self, width: int, *, combine: bool) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.combine = combine

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor, blocked: Tensor) -> Tensor:
        lowest = torch.finfo(torch.float32).min
        scores = self.query(x) @ self.key(memory).transpose(-2, -1)
        if self.combine:
            scores = scores.float() + (padding | blocked).float()[:, None, :] * lowest
        else:
            both = padding.float() * lowest + blocked.float() * lowest
            scores = scores + both[:, None, :]
        return scores.softmax(dim=-1) @ memory


class Captioner(nn.Module):
    def __init__(self, *, combine: bool) -> None:
        super().__init__()
        self.look = TwoMasks(8, combine=combine)
        self.words = nn.Linear(8, 11)

    def forward(self, words: Tensor, regions: Tensor, padding: Tensor, blocked: Tensor) -> Tensor:
        return self.words(words + self.look(words, regions, padding, blocked))


class CardPlayer(nn.Module):
    """A policy and a value from the board; illegal moves get -inf, and one player has no move left."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 24), nn.Tanh())
        self.moves = nn.Linear(24, 5)
        self.value = nn.Linear(24, 1)

    def forward(self, board: Tensor, legal: Tensor) -> dict[str, Tensor]:
        body = self.body(board)
        logits = self.moves(body).masked_fill(~legal, -torch.inf)
        return {"policy": F.log_softmax(logits, dim=-1).clamp(min=-100.0), "value": torch.tanh(self.value(body))}


def flags(rows: int, columns: int, *, full_row: int | None) -> Tensor:
    """True where something is missing: the last column everywhere, and one row altogether."""
    missing = torch.zeros(rows, columns, dtype=torch.bool)
    missing[:, -1] = True
    if full_row is not None:
        missing[full_row] = True
    return missing


def captions(*, full_row: int | None) -> Batch:
    return {
        "words": randn(3, 4, 8),
        "regions": randn(3, 6, 8, seed=1),
        "padding": flags(3, 6, full_row=full_row),
        "blocked": flags(3, 6, full_row=full_row),
    }


CASES = (
    case(
        "mask-constant/two-masks",
        seeded(Captioner, combine=False),
        lambda: captions(full_row=2),
        "numerics look add mask-constant-overflow",
        line="padding.float() * lowest + blocked.float() * lowest",
        repair={"build": seeded(Captioner, combine=True)},
    ),
    case(
        "full-row/no-legal-move",
        seeded(CardPlayer),
        lambda: {"board": randn(3, 10), "legal": ~flags(3, 5, full_row=2)},
        "numerics . log_softmax fully-masked-softmax",
        line="F.log_softmax(logits, dim=-1).clamp(min=-100.0)",
        repair={"batch": lambda: {"board": randn(3, 10), "legal": ~flags(3, 5, full_row=None)}},
    ),
)
