"""Without a loss a finite output is healthy only where the gradients of a stand-in are finite as well."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import nandoctor
from strangers.visits import blamed, line, normal

HIDDEN = torch.tensor([[False, False, True], [True, True, True]])


class Masked(nn.Linear):
    """Attention of which a sample sees nothing; `clean` removes its rows, which are NaN."""

    def __init__(self, clean):
        super().__init__(8, 8)
        self.clean = clean

    def forward(self, x, hidden):
        q = super().forward(x)
        weights = (q @ q.mT).masked_fill(hidden[:, None], -math.inf).softmax(-1)
        return self.clean(weights @ q, hidden)


CLEANED = {
    "filled": lambda rows, hidden: rows.masked_fill(hidden[..., None], 0.0),
    "picked": lambda rows, hidden: rows[~hidden],
    "replaced": lambda rows, _: rows.nan_to_num(),
}
BATCH = {"x": normal(2, 3, 8), "hidden": HIDDEN}


@pytest.mark.parametrize("kind", CLEANED)
def test_nan_that_the_output_lacks_and_gradients_have(examine, kind):
    report = examine(Masked(CLEANED[kind]), BATCH)
    assert report.verdict == "cannot-tell"
    assert "the gradients of a stand-in for the loss are not" in report.headline
    assert "--loss" in report.next_steps[0]
    known = examine(Masked(CLEANED[kind]), BATCH, loss=lambda output, _: output.float().sum())
    assert blamed(known) == ("numerics", "", "softmax", "fully-masked-softmax")
    assert known.headline.endswith("multiplies that NaN by 0, which is NaN")
    assert line(known).startswith("weights = ")


class Length(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * 0).square().sum(-1).sqrt()


def test_the_line_whose_gradient_is_infinite(examine):
    report = examine(Length(8, 8), {"x": normal(4, 8)})
    assert report.verdict == "cannot-tell"
    assert "the backward of sqrt (" in report.headline


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Length(8, 8), {"mode": "eval"}),
        (Length(8, 8).requires_grad_(False), {}),
        (nn.Sequential(nn.Linear(8, 8), nn.Hardtanh(-6e4, 6e4)), {}),
        (Masked(lambda rows, _: rows), {"batch": {**BATCH, "hidden": HIDDEN & ~HIDDEN[1]}}),
    ],
)
def test_gradients_that_nobody_takes_or_that_are_finite(examine, model, options):
    batch = options.pop("batch", {"x": normal(4, 8)})
    assert blamed(examine(model, batch, **options)) == ("healthy",)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


@pytest.mark.parametrize(("seed", "verdict"), [(0, "healthy"), (77, "cannot-tell")])
def test_a_finite_step_with_other_random_numbers(examine, seed, verdict):
    model, x = Noisy(4, 4), normal(2, 4)
    torch.manual_seed(seed)
    with nandoctor.cuda_autocast():
        saved = model(x).detach()
    report = examine(model, {"x": x, "logit": saved})
    assert report.verdict == verdict
    assert ("the replay drew others" in report.headline) == (verdict == "cannot-tell")


class Overflowing(Noisy):
    def forward(self, x):
        return 1e4 * super().forward(x)


def test_a_failing_step_with_other_random_numbers_says_so(examine):
    model, x = Overflowing(4, 4), torch.tensor([[0.0] * 4, [1e4, 2e4, -1e4, 3e4]])
    torch.manual_seed(77)
    with nandoctor.cuda_autocast():
        saved = model(x).detach()
    report = examine(model, {"x": x, "logit": saved})
    assert (report.verdict, report.reproduction.grade) == ("precision", "same-mask")
    assert sum("the replay drew others" in note for note in report.notes) == 1
