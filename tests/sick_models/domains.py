"""Values outside a function's domain, and the indeterminate forms inf - inf and 0 * inf.

In: nothing. Out: `CASES` of the rows "outside the domain" and "inf - inf, 0 * inf".
"""

import torch
from torch import Tensor, nn

from sick_models.case import Batch, biased, case, randn, seeded


class Moments(nn.Module):
    """Deviation by E[x^2] - E[x]^2, which fp16 rounds to below zero where x hardly varies."""

    def __init__(self, *, two_pass: bool) -> None:
        super().__init__()
        self.two_pass = two_pass

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        if self.two_pass:
            spread = (x - mean).square().mean(dim=-1, keepdim=True) + 1e-3
        else:
            spread = (x * x).mean(dim=-1, keepdim=True) - mean * mean
        return torch.cat([mean, torch.sqrt(spread)], dim=-1)


class MotorMonitor(nn.Module):
    """Vibration [batch, 2, 64] -> {"fault"}, from the statistics of filtered channels that hum evenly."""

    def __init__(self, *, two_pass: bool) -> None:
        super().__init__()
        self.filter = biased(nn.Conv1d(2, 12, 5), torch.linspace(20.0, 60.0, 12))
        self.moments = Moments(two_pass=two_pass)
        self.fault = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))

    def forward(self, inputs: Batch) -> Batch:
        return {"fault": self.fault(self.moments(self.filter(inputs["vibration"])))}


class SlopedAttention(nn.Module):
    """A -inf causal buffer, meant and innocent, multiplied by a learned gate per head; a gate of zero spoils it."""

    causal: Tensor

    def __init__(self, width: int, length: int, low: float) -> None:
        super().__init__()
        self.qk = nn.Linear(width, 2 * width)
        self.gate = nn.Parameter(torch.tensor([1.0, 0.0]).view(2, 1, 1))
        self.register_buffer("causal", torch.full((length, length), low).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        query, key = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qk(x).chunk(2, dim=-1))
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
        weights = (scores + self.gate * self.causal).softmax(dim=-1)
        return weights.mean(dim=1) @ x


class MusicModel(nn.Module):
    def __init__(self, low: float) -> None:
        super().__init__()
        self.notes = nn.Embedding(12, 8)
        self.blend = SlopedAttention(8, 6, low)
        self.head = nn.Linear(8, 12)

    def forward(self, notes: Tensor) -> Tensor:
        return self.head(self.blend(self.notes(notes)))


CASES = (
    case(
        "domain/one-pass-variance",
        seeded(MotorMonitor, two_pass=False),
        lambda: {"vibration": randn(3, 2, 64)},
        "precision moments sqrt invalid-domain",
        line="torch.cat([mean, torch.sqrt(spread)], dim=-1)",
        repair={"build": seeded(MotorMonitor, two_pass=True)},
    ),
    case(
        "form/gated-mask",
        seeded(MusicModel, low=float("-inf")),
        lambda: {"notes": torch.arange(12).view(2, 6)},
        "numerics blend mul indeterminate-form",
        line="(scores + self.gate * self.causal).softmax(dim=-1)",
        repair={"build": seeded(MusicModel, low=-1e4)},
    ),
)
