"""Meant infinities in outputs, one non-finite output of several, losses that cannot be computed, rare functions."""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss, mse_loss

from strangers.rows import Rows
from strangers.visits import Between, louder, normal

rows = Rows()
LEGAL = torch.tensor([[True, True, False, True, True, False]] * 4)
MOVES = {"x": normal(4, 8), "legal": LEGAL}


def played(move):
    return {**MOVES, "played": torch.full((4,), move)}


def of_moves(logits, batch):
    return cross_entropy(logits, batch["played"])


def smoothed(logits, batch):
    return cross_entropy(logits, batch["played"], label_smoothing=0.1)


ASKED = "numerics . masked_fill log-of-zero"


@rows("healthy", MOVES, 8, 6)
@rows("healthy", played(0), 8, 6, name="with its loss", holds=lambda report: not report.bad_gradients, loss=of_moves)
@rows(ASKED, played(2), 8, 6, name="loss that asks for a masked move", loss=of_moves)
@rows(ASKED, played(0), 8, 6, name="loss that is smoothed", loss=smoothed)
class Policy(nn.Linear):
    def forward(self, x, legal):
        return super().forward(x).masked_fill(~legal, -math.inf)


@rows("numerics . sqrt gradient-singularity", played(0), 8, 6, phase="backward", loss=of_moves)
class MaskThatDoesNotHideASickGradient(nn.Linear):
    def forward(self, x, legal):
        scores = super().forward(x)
        length = ((scores - scores.detach()).float() ** 2).sum(-1, keepdim=True).sqrt()
        return (scores + scores.detach() * length).masked_fill(~legal, -math.inf)


@rows.between("healthy", {"x": 100 + normal(30, 8)})
def saturated(x):
    return torch.tanh(x.half() * 6e4)


@rows.between("cannot-tell", {"x": 10 * normal(5, 8)}, says=("that it does not show",))
class BranchThatLeadsNowhere(nn.Module):
    """Whether its result is kept somewhere is not looked into."""

    def __init__(self):
        super().__init__()
        self.probe = louder(nn.Linear(8, 8), 6e4)

    def forward(self, x):
        self.probe(x) * 6e4
        return x


def tells_both(report):
    others = [(other.origin.place.module, other.origin.op, other.cause.code) for other in report.also]
    return others == [("", "mul", "elementwise-overflow")]


@rows("precision left linear matmul-overflow", {"x": normal(3, 8)}, holds=tells_both)
class TwoOverflowsApart(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = louder(nn.Linear(8, 8), 6e4)
        self.right = nn.Linear(8, 8)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        left = self.left(10 * x)
        right = self.right(x) * 1e6
        return self.head(torch.cat([left, right], dim=-1))


def of_text(output, batch):
    return ctc_loss(output, batch["text"], torch.full((2,), 4), torch.full((2,), 5))


LONG_TEXT = {"x": normal(4, 2, 8), "text": torch.ones(2, 5, dtype=torch.long)}


@rows("numerics <loss> ctc_loss log-of-zero", LONG_TEXT, 8, 6, name="ctc target longer than its input", loss=of_text)
class Reader(nn.Linear):
    def forward(self, x):
        return super().forward(x).log_softmax(-1)


def term_of_nothing(output, batch):
    return mse_loss(output, batch["y"]) + output[batch["y"] > 100].mean()


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 0

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("expected scalar type Float but found Half")


@rows(
    "numerics <loss> mean empty-reduction",
    {"x": normal(3, 8), "y": normal(3, 2)},
    name="term of the loss that averages nothing",
    says=("is finite at loss scale 1: GradScaler does not skip",),
    loss=term_of_nothing,
)
@rows(
    "numerics <loss> div",
    {"x": normal(3, 8)},
    name="gradients that were never made",
    holds=lambda report: not any("gradient" in note for note in report.notes),
    loss=lambda output, _: Broken.apply(output).mean(),
)
def relu():
    return Between(nn.ReLU())


OFF_THE_TRACK = {
    "atanh": ("invalid-domain", lambda x: torch.atanh(x.float().tanh().round())),
    "pow": ("invalid-domain", lambda x: (x.float() - 5).prod(-1, keepdim=True).neg().abs().neg() ** 0.5),
    "logdet": ("log-of-zero", lambda x: x + torch.logdet(0 * x[:2, :2].float())),
    "logdet, negative": (
        "invalid-domain",
        lambda x: x + torch.logdet(torch.diag(x.new_tensor([1.0, -1.0]).float())),
    ),
    "lerp": ("elementwise-overflow", lambda x: torch.lerp(x, -x, 1e6)),
    "addcmul": ("elementwise-overflow", lambda x: torch.addcmul(x, x, x, value=1e5).half()),
}
for name, (cause, function) in OFF_THE_TRACK.items():
    rows.between(f"* middle {name.split(',')[0]} {cause}", {"x": 5 * normal(4, 8)}, name=name)(function)


def log_of_output(output, _):
    return -output.log().mean()


LOG = "numerics <loss> log log-of-zero"
ADVICE = ("and take F.log_softmax of them here",)


@rows(LOG, {"x": normal(4, 8)}, True, never=ADVICE, loss=log_of_output)
@rows(LOG, {"x": 1e4 * normal(4, 8)}, False, says=ADVICE, loss=log_of_output)
class Chooser(nn.Linear):
    def __init__(self, masked):
        super().__init__(8, 4)
        self.masked = masked

    def forward(self, x):
        choices = super().forward(x)
        return (choices.masked_fill(torch.eye(4).bool(), -torch.inf) if self.masked else choices).softmax(-1)


class Judge(nn.Linear):
    """A clamp stops the NaN, and leaves what it clamps no gradient: what is better is told beside it."""

    def forward(self, x):
        return torch.sigmoid(super().forward(x))


for made, form in (("1 - p", "of their negative"), ("1 - (1 - p)", "of them")):
    rows(
        LOG,
        {"x": 1e3 * normal(6, 8)},
        name=made,
        make=lambda model: model(8, 1),
        says=(f"and take F.logsigmoid {form} here",),
        loss=lambda output, _, made=made: -eval(made, {"p": output}).log().mean(),
    )(Judge)
