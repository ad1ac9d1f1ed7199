"""Exponentials that overflow and sigmoids that saturate until the logarithm meets a zero.

In: nothing. Out: `CASES` of the rows "exp too large" and "saturated sigmoid".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, case, rand, randn, scaled, seeded


class Contrast(nn.Module):
    """Images against captions, with a learned temperature exp(logit_scale) that nothing bounds."""

    def __init__(self, logit_scale: float) -> None:
        super().__init__()
        self.image = nn.Linear(20, 8)
        self.text = nn.Embedding(9, 8)
        self.logit_scale = nn.Parameter(torch.tensor(logit_scale))

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        left = F.normalize(self.image(image), dim=-1)
        right = F.normalize(self.text(caption).mean(dim=1), dim=-1)
        similarity = left @ right.T
        return (similarity * self.logit_scale.exp()).softmax(dim=-1)


class Spam(nn.Module):
    """A table [batch, 7] -> {"probability"}, a sigmoid at the end as tutorials have it."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.hidden = nn.Linear(7, 16)
        self.last = scaled(nn.Linear(16, 1), gain)

    def forward(self, inputs: Batch) -> Batch:
        return {"probability": torch.sigmoid(self.last(F.relu(self.hidden(inputs["words"])))).squeeze(-1)}


def hand_written_cross_entropy(output: Batch, batch: Batch) -> Tensor:
    probability, target = output["probability"], batch["spam"]
    return -(target * torch.log(probability) + (1 - target) * torch.log(1 - probability)).mean()


CASES = (
    case(
        "exponential/temperature",
        seeded(Contrast, logit_scale=12.5),
        lambda: {"image": randn(4, 20), "caption": torch.arange(12).view(4, 3) % 9},
        "precision . mul exp-overflow",
        line="(similarity * self.logit_scale.exp())",
        near_causes=("elementwise-overflow",),
        repair={"build": seeded(Contrast, logit_scale=2.7)},
    ),
    case(
        "sigmoid/spam",
        seeded(Spam, gain=-40.0),
        lambda: {"words": rand(6, 7), "spam": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])},
        "precision <loss> log log-of-zero",
        loss=hand_written_cross_entropy,
        phase="loss",
        line="(1 - target) * torch.log(1 - probability)",
        repair={"build": seeded(Spam, gain=1.0)},
    ),
)
