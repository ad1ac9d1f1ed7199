"""Masks that go wrong: constants that fp16 cannot hold, rows with every key masked.

In: nothing. Out: `CASES` of the rows "mask constant" and "full mask row".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, case, randn, seeded


class WhereAttention(nn.Module):
    """Masks by torch.where with a constant that was chosen for fp32."""

    def __init__(self, width: int, low: float | None) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.low = low

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        low = torch.finfo(scores.dtype).min if self.low is None else self.low
        scores = torch.where(keep[:, None, :], scores, low)
        return scores.softmax(dim=-1) @ value


class Tagger(nn.Module):
    """Tokens [batch, length], 0 the padding -> tag logits."""

    def __init__(self, low: float | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blend = WhereAttention(16, low)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.blend(x, tokens != 0))


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
    """Words [batch, 4, 8] that look at image regions [batch, 6, 8]."""

    def __init__(self, *, combine: bool) -> None:
        super().__init__()
        self.look = TwoMasks(8, combine=combine)
        self.words = nn.Linear(8, 11)

    def forward(self, words: Tensor, regions: Tensor, padding: Tensor, blocked: Tensor) -> Tensor:
        return self.words(words + self.look(words, regions, padding, blocked))


class DialogueEncoder(nn.Module):
    """nn.MultiheadAttention over turns, with a padding mask; returns the attention maps too."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Linear(6, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, dialogue: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.turns(dialogue))
        mixed, maps = self.attend(x, x, x, key_padding_mask=padding, need_weights=True)
        return self.norm(x + mixed), maps


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


def tokens_with_an_empty_sample(*, empty: bool) -> Batch:
    tokens = 1 + torch.arange(18).view(3, 6)
    tokens[0, 4:] = 0
    if empty:
        tokens[2] = 0
    return {"tokens": tokens}


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
        "mask-constant/where",
        seeded(Tagger, low=-1e9),
        lambda: tokens_with_an_empty_sample(empty=True),
        "precision blend where mask-constant-overflow",
        line="torch.where(keep[:, None, :], scores, low)",
        repair={"build": seeded(Tagger, low=None)},
    ),
    case(
        "mask-constant/two-masks",
        seeded(Captioner, combine=False),
        lambda: captions(full_row=2),
        "numerics look add mask-constant-overflow",
        call=lambda model, batch: model(**batch),
        line="padding.float() * lowest + blocked.float() * lowest",
        repair={"build": seeded(Captioner, combine=True)},
    ),
    case(
        "full-row/multihead-attention",
        seeded(DialogueEncoder),
        lambda: {"dialogue": randn(3, 7, 6), "padding": flags(3, 7, full_row=0)},
        "numerics attend softmax fully-masked-softmax",
        line="self.attend(x, x, x, key_padding_mask=padding",
        repair={"batch": lambda: {"dialogue": randn(3, 7, 6), "padding": flags(3, 7, full_row=None)}},
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
