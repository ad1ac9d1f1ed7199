"""Exponentials that overflow and sigmoids that saturate until the logarithm meets a zero.

In: nothing. Out: `CASES` of the rows "exp too large" and "saturated sigmoid".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, biased, case, rand, randn, scaled, seeded


class Reparametrised(nn.Module):
    """mean + exp(logvar / 2) * noise, with or without a bound on the log-variance."""

    def __init__(self, width: int, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.mean = nn.Linear(width, 4)
        self.logvar = biased(nn.Linear(width, 4), 230.0, unit=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.mean(x)
        logvar = self.logvar(x).clamp(-self.bound, self.bound)
        spread = torch.exp(0.5 * logvar)
        return mean + spread * torch.randn_like(mean), mean, logvar


class Autoencoder(nn.Module):
    """Digits [batch, 1, 8, 8] -> (picture, mean, logvar)."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.sample = Reparametrised(16, bound)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64), nn.Unflatten(1, (1, 8, 8)))

    def forward(self, digit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        code, mean, logvar = self.sample(self.encode(digit))
        return torch.sigmoid(self.decode(code)), mean, logvar


class Loudness(nn.Module):
    """A gain in octaves: exp2 is on none of autocast's lists, so it stays in fp16."""

    def __init__(self, octaves: float) -> None:
        super().__init__()
        self.control = biased(nn.Conv1d(4, 1, 1), octaves)

    def forward(self, wave: Tensor) -> Tensor:
        return wave * torch.exp2(self.control(wave))


class Mastering(nn.Module):
    """Audio [batch, 4, 30] -> {"audio"}, levelled."""

    def __init__(self, octaves: float) -> None:
        super().__init__()
        self.filter = nn.Conv1d(4, 4, 5, padding=2, groups=4)
        self.loudness = Loudness(octaves)
        self.level = nn.GroupNorm(1, 4)

    def forward(self, audio: Tensor) -> Batch:
        return {"audio": self.level(self.loudness(self.filter(audio)))}


class HandSoftplus(nn.Module):
    """log(1 + exp(x)), as the formula says, or as torch does it."""

    def __init__(self, *, stable: bool) -> None:
        super().__init__()
        self.stable = stable

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x) if self.stable else torch.log(1 + torch.exp(x))


class RateModel(nn.Module):
    """Counts per hour from a table [batch, 6]; the same positive function serves both of its ends."""

    def __init__(self, *, stable: bool) -> None:
        super().__init__()
        self.positive = HandSoftplus(stable=stable)
        self.early = nn.Linear(6, 12)
        self.late = biased(nn.Linear(12, 1), 140.0)

    def forward(self, table: Tensor) -> Tensor:
        return self.positive(self.late(self.positive(self.early(table))))


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


class Judge(nn.Module):
    """A critic of pictures [batch, 3, 8, 8] -> the probability that they are real."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 8, 4, stride=2), nn.LeakyReLU(0.2), nn.Flatten())
        self.verdict = scaled(nn.Linear(72, 1), gain)

    def forward(self, picture: Tensor) -> Tensor:
        return torch.sigmoid(self.verdict(self.look(picture)).float())


def saturating_generator_loss(output: Tensor, _batch: Batch) -> Tensor:
    return torch.log(1.0 - output).mean()


class StickBreaking(nn.Module):
    """Mixture weights from sigmoids: log of what is left of the stick after each break."""

    def __init__(self, width: int, pieces: int, gain: float) -> None:
        super().__init__()
        self.breaks = scaled(nn.Linear(width, pieces), gain)

    def forward(self, x: Tensor) -> Tensor:
        taken = torch.sigmoid(self.breaks(x))
        left = torch.cumsum(torch.log(1 - taken), dim=-1)
        return torch.log(taken[..., :1]) + left


class MixtureDensity(nn.Module):
    """Sequences [batch, time, 6] -> log-weights of a mixture at every step."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.read = nn.GRU(6, 16, batch_first=True)
        self.weights = StickBreaking(16, 4, gain)

    def forward(self, strokes: Tensor) -> Tensor:
        return self.weights(self.read(strokes)[0])


class Chooser(nn.Module):
    """Items [batch, 5, 8] -> log-probability of each, as the log of a softmax that can underflow."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), scaled(nn.Linear(16, 1), gain))

    def forward(self, items: Tensor) -> Tensor:
        scores = self.score(items).squeeze(-1)
        return torch.log(scores.softmax(dim=-1))


CASES = (
    case(
        "exponential/reparametrised",
        seeded(Autoencoder, bound=1e3),
        lambda: {"digit": rand(2, 1, 8, 8)},
        "numerics sample exp exp-overflow",
        line="spread = torch.exp(0.5 * logvar)",
        repair={"build": seeded(Autoencoder, bound=10.0)},
    ),
    case(
        "exponential/octaves",
        seeded(Mastering, octaves=17.0),
        lambda: {"audio": randn(2, 4, 30)},
        "precision loudness exp2 exp-overflow",
        line="wave * torch.exp2(self.control(wave))",
        repair={"build": seeded(Mastering, octaves=3.0)},
    ),
    case(
        "exponential/softplus-by-hand",
        seeded(RateModel, stable=False),
        lambda: {"table": randn(4, 6)},
        "numerics positive exp exp-overflow",
        line="torch.log(1 + torch.exp(x))",
        repair={"build": seeded(RateModel, stable=True)},
    ),
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
    case(
        "sigmoid/critic",
        seeded(Judge, gain=400.0),
        lambda: {"picture": randn(4, 3, 8, 8)},
        "numerics <loss> log log-of-zero",
        loss=saturating_generator_loss,
        phase="loss",
        line="torch.log(1.0 - output).mean()",
        repair={"build": seeded(Judge, gain=1.0)},
    ),
    case(
        "sigmoid/stick-breaking",
        seeded(MixtureDensity, gain=30.0),
        lambda: {"strokes": randn(2, 5, 6)},
        "precision weights log log-of-zero",
        line="torch.cumsum(torch.log(1 - taken), dim=-1)",
        repair={"build": seeded(MixtureDensity, gain=1.0)},
    ),
    case(
        "sigmoid/log-of-softmax",
        seeded(Chooser, gain=400.0),
        lambda: {"items": randn(3, 5, 8)},
        "numerics . log log-of-zero",
        line="torch.log(scores.softmax(dim=-1))",
        repair={"build": seeded(Chooser, gain=1.0)},
    ),
)
