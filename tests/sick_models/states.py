"""Poison that stood in the file before the step: weights, buffers, batches, targets, and an optimizer in pure fp16.

In: nothing. Out: `CASES` of the rows "non-finite weights", "... buffers", "... batch" and "optimizer eps".
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, case, rand, randn, seeded

Spoil = Callable[[nn.Module], None]


def untouched(_model: nn.Module) -> None:
    """What the healthy twin does to its weights."""


def spoil(name: str, *, element: int) -> Spoil:
    """Writes NaN into one element of a parameter or buffer."""

    def write(model: nn.Module) -> None:
        tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
        with torch.no_grad():
            tensor.view(-1)[element] = torch.nan

    return write


class TextureNet(nn.Module):
    """Textures [batch, 3, 10, 10] -> logits; its LayerNorms hide nothing."""

    def __init__(self, spoiled: Spoil) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(6, 6, 3, groups=2), nn.GroupNorm(2, 6), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
        spoiled(self)

    def forward(self, texture: Tensor) -> Tensor:
        return self.head(self.mid(self.stem(texture)))


class Codebook(nn.Module):
    """Nearest codes from a buffer that a moving average keeps."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(7, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        distance = torch.cdist(x.float(), self.codes)
        nearest = distance.argmin(dim=-1)
        return self.codes[nearest], nearest


class Quantised(nn.Module):
    def __init__(self, spoiled: Spoil) -> None:
        super().__init__()
        self.encode = nn.Linear(10, 4)
        self.book = Codebook()
        self.decode = nn.Linear(4, 10)
        spoiled(self)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        quantised, nearest = self.book(self.encode(frames))
        return self.decode(quantised), nearest


class Deblur(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.PReLU(), nn.Conv2d(6, 1, 3, padding=1))

    def forward(self, picture: Tensor) -> Tensor:
        return picture + self.body(picture)


class Weather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(2, 8, 3, padding=1)
        self.decode = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, field: Tensor) -> Tensor:
        return self.decode(F.silu(self.encode(field)))


def field_error(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["tomorrow"])


class HalfVectors(nn.Module):
    """Word vectors in pure fp16: words that are not in the batch have a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 6)
        self.context = nn.Linear(6, 12, bias=False)
        self.half()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.context(self.words(tokens).mean(dim=1))


def label_error(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.float(), batch["label"])


def holed_picture(value: float) -> Batch:
    picture = rand(2, 1, 9, 9)
    picture[1, 0, 4, 4] = value
    return {"picture": picture}


def fields(value: float) -> Batch:
    tomorrow = randn(2, 1, 8, 8, seed=1)
    tomorrow[0, 0, 2, 3] = value
    return {"field": randn(2, 2, 8, 8), "tomorrow": tomorrow}


def tokens_and_labels() -> Batch:
    return {"tokens": torch.tensor([[0, 1, 2], [3, 4, 5]]), "label": torch.tensor([1, 2])}


CASES = (
    case(
        "weights/one-nan",
        seeded(TextureNet, spoil("mid.0.weight", element=17)),
        lambda: {"texture": randn(2, 3, 10, 10)},
        "state mid.0 - poisoned-weights",
        repair={"build": seeded(TextureNet, untouched)},
    ),
    case(
        "buffers/codebook",
        seeded(Quantised, spoil("book.codes", element=9)),
        lambda: {"frames": randn(2, 5, 10)},
        "state book - poisoned-buffers",
        repair={"build": seeded(Quantised, untouched)},
    ),
    case(
        "batch/nan-pixel",
        seeded(Deblur),
        lambda: holed_picture(float("nan")),
        "input . - poisoned-input",
        repair={"batch": lambda: holed_picture(0.5)},
    ),
    case(
        "batch/nan-target",
        seeded(Weather),
        lambda: fields(float("nan")),
        "input . - poisoned-target",
        loss=field_error,
        repair={"batch": lambda: fields(0.3)},
    ),
    case(
        "optimizer/unseen-words",
        seeded(HalfVectors),
        tokens_and_labels,
        "precision words addcdiv optimizer-eps-underflow",
        loss=label_error,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        repair={"optimizer": partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)},
    ),
)
