"""Hand-written norms and energies that square in fp16: some die of it, some go on with zeros.

In: nothing. Out: `CASES` of the row "square or mean too large".
"""

import torch
from torch import Tensor, nn

from sick_models.case import Batch, case, randn, scaled, seeded


class RootMeanSquare(nn.Module):
    """x / rms(x), written with x * x; with `upcast` as the published ones do it."""

    def __init__(self, width: int, *, upcast: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.upcast = upcast

    def forward(self, x: Tensor) -> Tensor:
        if self.upcast:
            x = x.float()
        power = (x * x).mean(dim=-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(power + 1e-6))


class SmallLanguageModel(nn.Module):
    """Tokens [batch, length] -> {"logits", "hidden"}; its stream starts in a linear layer, so it is fp16."""

    def __init__(self, *, upcast: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(25, 16)
        self.project = scaled(nn.Linear(16, 16), 2000.0)
        self.norm = RootMeanSquare(16, upcast=upcast)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 25)

    def forward(self, tokens: Tensor) -> Batch:
        x = self.project(self.embed(tokens))
        hidden = self.mlp(self.norm(x))
        return {"logits": self.head(hidden), "hidden": hidden}


class ChannelScale(nn.Module):
    """Divides every channel by its own deviation over the picture."""

    def __init__(self, *, upcast: bool) -> None:
        super().__init__()
        self.upcast = upcast

    def forward(self, x: Tensor) -> Tensor:
        if self.upcast:
            x = x.float()
        spread = x.var(dim=(2, 3), keepdim=True)
        return (x - x.mean(dim=(2, 3), keepdim=True)) / torch.sqrt(spread + 1e-5)


class Colouriser(nn.Module):
    """Grey images [batch, 1, 12, 12] -> two colour channels of the same size."""

    def __init__(self, *, upcast: bool) -> None:
        super().__init__()
        self.stem = scaled(nn.Conv2d(1, 8, 3, padding=1), 700.0)
        self.even = ChannelScale(upcast=upcast)
        self.exit = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, grey: Tensor) -> Tensor:
        return torch.tanh(self.exit(self.even(self.stem(grey))))


CASES = (
    case(
        "square/rms-silent",
        seeded(SmallLanguageModel, upcast=False),
        lambda: {"tokens": torch.arange(18).view(2, 9)},
        "silent norm mul silent-overflow",
        line="power = (x * x).mean(dim=-1, keepdim=True)",
        repair={"build": seeded(SmallLanguageModel, upcast=True)},
    ),
    case(
        "square/channel-variance-silent",
        seeded(Colouriser, upcast=False),
        lambda: {"grey": randn(2, 1, 12, 12)},
        "silent even var silent-overflow",
        line="spread = x.var(dim=(2, 3), keepdim=True)",
        repair={"build": seeded(Colouriser, upcast=True)},
    ),
)
