"""A hand-written norm that squares in fp16, and goes on with zeros.

In: nothing. Out: `CASES` of the row "square or mean too large".
"""

import torch
from torch import Tensor, nn

from sick_models.case import case, randn, scaled, seeded


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
    def __init__(self, *, upcast: bool) -> None:
        super().__init__()
        self.stem = scaled(nn.Conv2d(1, 8, 3, padding=1), 700.0)
        self.even = ChannelScale(upcast=upcast)
        self.exit = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, grey: Tensor) -> Tensor:
        return torch.tanh(self.exit(self.even(self.stem(grey))))


CASES = (
    case(
        "square/channel-variance-silent",
        seeded(Colouriser, upcast=False),
        lambda: {"grey": randn(2, 1, 12, 12)},
        "silent even var silent-overflow",
        line="spread = x.var(dim=(2, 3), keepdim=True)",
        repair={"build": seeded(Colouriser, upcast=True)},
    ),
)
