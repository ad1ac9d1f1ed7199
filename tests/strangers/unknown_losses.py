"""Without a loss a finite output is healthy only where the gradients of a made-up loss are finite as well."""

import math

import torch
from torch import nn

import nandoctor
from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
HIDDEN = torch.tensor([[False, False, True], [True, True, True]])
BATCH, ROWS = {"x": normal(2, 3, 8), "hidden": HIDDEN}, {"x": normal(4, 8)}


class Masked(nn.Linear):
    """Attention of which a sample sees nothing; `clean` removes its rows, which are NaN."""

    def __init__(self, clean):
        super().__init__(8, 8)
        self.clean = clean

    def forward(self, x, hidden):
        q = super().forward(x)
        weights = (q @ q.mT).masked_fill(hidden[:, None], -math.inf).softmax(-1)
        return self.clean(weights @ q, hidden)


def asks_for_a_loss(report):
    return "--loss" in report.next_steps[0]


CLEANED = {
    "filled": lambda rows, hidden: rows.masked_fill(hidden[..., None], 0.0),
    "picked": lambda rows, hidden: rows[~hidden],
    "replaced": lambda rows, _: rows.nan_to_num(),
}


def tells_the_product(report):
    return report.headline.endswith("multiplies that NaN by 0, which is NaN")


for name, clean in CLEANED.items():
    masked = {"line": "weights = ", "holds": tells_the_product}
    told = "any that reads the output fails so"
    rows("numerics . softmax fully-masked-softmax", BATCH, clean, name=name, says=(told,), **masked)(Masked)
rows("healthy", {**BATCH, "hidden": HIDDEN & ~HIDDEN[1]}, lambda rows, _: rows, name="nothing to clean")(Masked)


@rows("numerics . sqrt gradient-singularity", ROWS)
@rows("healthy", ROWS, name="length in eval mode", mode="eval")
@rows("healthy", ROWS, False)
def length(is_trained=True):
    return Length(8, 8).requires_grad_(is_trained)


class Length(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * 0).square().sum(-1).sqrt()


@rows(
    "cannot-tell", ROWS, says=("the gradients of a made-up loss are not: the backward of mul (",), holds=asks_for_a_loss
)
class Steep(nn.Linear):
    """A slope that passes fp32's limit only if the loss's own does not make it small."""

    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return super().forward(x).float() * 1e-30 * 1e32 * 1e12


@rows("healthy", ROWS)
def limited():
    return nn.Sequential(nn.Linear(8, 8), nn.Hardtanh(-6e4, 6e4))


def drawn(x, seed):
    """What the model gives for other random numbers than the replay draws, or for the same."""

    def batch(model):
        torch.manual_seed(seed)
        with nandoctor.cuda_autocast():
            return {"x": x, "logit": model(x).detach()}

    return batch


OTHERS = ("the replay drew others",)
LARGE = torch.tensor([[0.0] * 4, [1e4, 2e4, -1e4, 3e4]])


@rows("healthy", drawn(normal(2, 4), 0), 1.0, name="the same numbers", never=OTHERS)
@rows("cannot-tell", drawn(normal(2, 4), 77), 1.0, name="other numbers", says=OTHERS)
@rows(
    "precision",
    drawn(LARGE, 77),
    1e4,
    says=OTHERS,
    holds=lambda report: (
        report.reproduction.grade == "same-mask" and sum(OTHERS[0] in note for note in report.notes) == 1
    ),
)
class Noisy(nn.Linear):
    def __init__(self, gain):
        super().__init__(4, 4)
        self.gain = gain

    def forward(self, x):
        return self.gain * super().forward(x + torch.randn_like(x))
