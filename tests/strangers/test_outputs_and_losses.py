"""Meant infinities in outputs, one non-finite output of several, losses that cannot be computed, rare functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss, layer_norm, mse_loss

from strangers.visits import Between, blamed, line, louder, normal

HEALTHY = ("healthy",)


class Policy(nn.Module):
    """Illegal moves get -inf, on purpose."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 6)

    def forward(self, x, legal):
        return self.score(x).masked_fill(~legal, -math.inf)


LEGAL = torch.tensor([[True, True, False, True, True, False]] * 4)
MOVES = {"x": normal(4, 8), "legal": LEGAL}


def test_a_masked_logit_is_healthy(examine):
    assert blamed(examine(Policy(), MOVES)) == HEALTHY


def test_a_masked_logit_with_its_loss_is_healthy(examine):
    batch = {**MOVES, "played": torch.zeros(4, dtype=torch.long)}
    report = examine(Policy(), batch, loss=lambda logits, batch: cross_entropy(logits, batch["played"]))
    assert blamed(report) == HEALTHY
    assert not report.bad_gradients


@pytest.mark.parametrize(("played", "smoothing"), [(2, 0.0), (0, 0.1)])
def test_a_loss_that_asks_for_a_masked_move(examine, played, smoothing):
    batch = {**MOVES, "played": torch.full((4,), played)}
    report = examine(
        Policy(), batch, loss=lambda logits, batch: cross_entropy(logits, batch["played"], label_smoothing=smoothing)
    )
    assert blamed(report) == ("numerics", "", "masked_fill", "log-of-zero")


def test_a_masked_logit_does_not_hide_a_sick_gradient(examine):
    class Norm(Policy):
        def forward(self, x, legal):
            scores = self.score(x)
            length = ((scores - scores.detach()).float() ** 2).sum(-1, keepdim=True).sqrt()
            return (scores + scores.detach() * length).masked_fill(~legal, -math.inf)

    batch = {**MOVES, "played": torch.zeros(4, dtype=torch.long)}
    report = examine(Norm(), batch, loss=lambda logits, batch: cross_entropy(logits, batch["played"]))
    assert blamed(report) == ("numerics", "", "sqrt", "gradient-singularity")
    assert report.origin.phase == "backward"


@pytest.mark.parametrize(
    "cut", [lambda x: x.clamp(-1, 1), torch.sigmoid, torch.tanh, nn.functional.hardtanh, nn.functional.relu6]
)
def test_an_infinity_removed_by_saturation_is_healthy(examine, cut):
    class Saturated(nn.Module):
        def forward(self, x):
            return cut(x.half() * 6e4)

    assert blamed(examine(Between(Saturated()), {"x": 100 + normal(30, 8)})) == HEALTHY


def test_a_branch_that_leads_nowhere_is_healthy(examine):
    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.probe = louder(nn.Linear(8, 8), 6e4)

        def forward(self, x):
            self.probe(x) * 6e4
            return x

    assert blamed(examine(Between(Curious()), {"x": 10 * normal(5, 8)})) == HEALTHY


def test_one_of_two_outputs_is_nonfinite(examine):
    class Adversaries(nn.Module):
        def __init__(self):
            super().__init__()
            self.generate = nn.Linear(8, 8)
            self.critic = nn.ModuleDict({"real": nn.Linear(8, 1), "fake": louder(nn.Linear(8, 1), 6e4)})

        def forward(self, x):
            fake = self.generate(10 * x)
            return {"real": self.critic["real"](fake), "fake": self.critic["fake"](fake)}

    report = examine(Adversaries(), {"x": normal(3, 8)})
    assert blamed(report) == ("precision", "critic.fake", "linear", "matmul-overflow")
    assert report.also == ()


def test_two_overflows_that_have_nothing_to_do_with_each_other(examine):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = louder(nn.Linear(8, 8), 6e4)
            self.right = nn.Linear(8, 8)
            self.head = nn.Linear(16, 2)

        def forward(self, x):
            left = self.left(10 * x)
            right = self.right(x) * 1e6
            return self.head(torch.cat([left, right], dim=-1))

    report = examine(Branches(), {"x": normal(3, 8)})
    assert blamed(report) == ("precision", "left", "linear", "matmul-overflow")
    assert [(other.origin.place.module, other.origin.op, other.cause.code) for other in report.also] == [
        ("", "mul", "elementwise-overflow")
    ]


def test_bf16_has_the_range_that_fp16_lacks(examine):
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.loud = louder(nn.Linear(8, 8), 6e4)

        def forward(self, x):
            return layer_norm(self.loud(x), (8,))

    model, batch = Between(Loud()), {"x": 30 * normal(3, 8)}
    assert blamed(examine(model, batch, amp_dtype="bfloat16")) == HEALTHY
    assert blamed(examine(model, batch)) == ("precision", "middle.loud", "linear", "matmul-overflow")


def test_a_ctc_target_longer_than_its_input(examine):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(8, 6)

        def forward(self, x):
            return self.read(x).log_softmax(-1)

    def loss(output, batch):
        return ctc_loss(output, batch["text"], torch.full((2,), 4), torch.full((2,), 5))

    batch = {"x": normal(4, 2, 8), "text": torch.ones(2, 5, dtype=torch.long)}
    assert blamed(examine(Reader(), batch, loss=loss)) == ("numerics", "<loss>", "ctc_loss", "log-of-zero")


def test_a_term_of_the_loss_averages_nothing(examine):
    def loss(output, batch):
        return mse_loss(output, batch["y"]) + output[batch["y"] > 100].mean()

    report = examine(Between(nn.ReLU()), {"x": normal(3, 8), "y": normal(3, 2)}, loss=loss)
    assert blamed(report) == ("numerics", "<loss>", "mean", "empty-reduction")
    assert any("is finite at loss scale 1: GradScaler does not skip" in note for note in report.notes)


def test_a_gradient_penalty_where_the_gradient_is_zero(examine):
    class Critic(nn.Module):
        """Takes a gradient on its way, as WGAN-GP does."""

        def __init__(self):
            super().__init__()
            self.entry = nn.Linear(8, 8)
            self.exit = nn.Linear(8, 1)
            with torch.no_grad():
                self.entry.bias.fill_(-10.0)

        def forward(self, x):
            x = x.clone().requires_grad_()
            score = self.exit(torch.relu(self.entry(x)))
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            return score, slope

    def loss(output, batch):
        score, slope = output
        length = slope.float().pow(2).sum(-1).sqrt()
        return score.mean() + (length - 1).pow(2).mean()

    report = examine(Critic(), {"x": torch.zeros(3, 8)}, loss=loss)
    assert blamed(report) == ("numerics", "<loss>", "sqrt", "gradient-singularity")
    assert line(report) == "length = slope.float().pow(2).sum(-1).sqrt()"


def test_gradients_that_were_never_made_are_not_called_finite(examine):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x / 0

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("expected scalar type Float but found Half")

    def loss(output, batch):
        return Broken.apply(output).mean()

    report = examine(Between(nn.ReLU()), {"x": normal(3, 8)}, loss=loss)
    assert blamed(report)[:3] == ("numerics", "<loss>", "div")
    assert not any("gradient" in note for note in report.notes)


EMPTY_AT_1 = torch.tensor([3, 0, 1])


@pytest.mark.parametrize(
    ("function", "op", "cause"),
    [
        (lambda x: torch.lgamma(x.relu()), "lgamma", "invalid-domain"),
        (lambda x: torch.atanh(x.float().tanh().round()), "atanh", "invalid-domain"),
        (lambda x: (x.float() - 5).prod(-1, keepdim=True).neg().abs().neg() ** 0.5, "pow", "invalid-domain"),
        (lambda x: x + torch.logdet(0 * x[:2, :2].float()), "logdet", "log-of-zero"),
        (lambda x: x + torch.logdet(torch.diag(x.new_tensor([1.0, -1.0]).float())), "logdet", "invalid-domain"),
        (lambda x: torch.segment_reduce(x.float(), "max", lengths=EMPTY_AT_1), "segment_reduce", "empty-reduction"),
        (lambda x: torch.lerp(x, -x, 1e6), "lerp", "elementwise-overflow"),
        (lambda x: torch.addcmul(x, x, x, value=1e5).half(), "addcmul", "elementwise-overflow"),
    ],
    ids=["lgamma", "atanh", "pow", "logdet", "negative", "segment", "lerp", "addcmul"],
)
def test_functions_off_the_beaten_track(examine, function, op, cause):
    class Off(nn.Module):
        def forward(self, x):
            return function(x)

    report = examine(Between(Off()), {"x": 5 * normal(4, 8)})
    assert blamed(report)[1:] == ("middle", op, cause)


def test_a_mixture_whose_last_expert_gets_nothing(examine):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.route = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            choice = self.route(x).argmax(-1).clamp(max=2)
            return sum(expert(x[choice == index]).mean(0) for index, expert in enumerate(self.experts))

    assert blamed(examine(Mixture(), {"x": normal(30, 8)})) == ("numerics", "", "mean", "empty-reduction")


@pytest.mark.parametrize("masked", [False, True])
def test_a_softmax_and_a_logarithm_in_two_functions(examine, masked):
    class Chooser(nn.Linear):
        def forward(self, x):
            choices = super().forward(x)
            return (choices.masked_fill(torch.eye(4).bool(), -torch.inf) if masked else choices).softmax(-1)

    def loss(output, batch):
        return -output.log().mean()

    report = examine(Chooser(8, 4), {"x": normal(4, 8) if masked else 1e4 * normal(4, 8)}, loss=loss)
    assert blamed(report) == ("numerics", "<loss>", "log", "log-of-zero")
    assert ("and take F.log_softmax of them here" in report.cause.explanation) != masked


@pytest.mark.parametrize(("made", "form"), [("1 - p", "of their negative"), ("1 - (1 - p)", "of them")])
def test_one_minus_a_sigmoid_and_its_logarithm_in_two_functions(examine, made, form):
    """A clamp stops the NaN, and leaves what it clamps no gradient: what is better is told beside it."""

    class Judge(nn.Linear):
        def forward(self, x):
            return torch.sigmoid(super().forward(x))

    def loss(output, batch):
        return -eval(made, {"p": output}).log().mean()

    report = examine(Judge(8, 1), {"x": 1e3 * normal(6, 8)}, loss=loss)
    assert blamed(report) == ("numerics", "<loss>", "log", "log-of-zero")
    assert f"and take F.logsigmoid {form} here" in report.cause.explanation
