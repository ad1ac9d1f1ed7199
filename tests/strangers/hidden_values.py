"""A finite output beside NaN that a later step may read, or that may have chosen it; and what only looks like it."""

import math

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import mean, normal

rows = Rows()
BATCH = {"x": normal(4, 4)}
OFF = "off fp32's under fp16 autocast"
DOUBTED = "that it does not show"


class Hiding(nn.Module):
    """A layer, a table of five rows, places to keep things in, and anything that uses them."""

    def __init__(self, then):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), nn.Embedding(5, 4)
        self.memory, self.then = {}, then
        self.register_buffer("seen", torch.ones(len(BATCH["x"]), 4), persistent=False)

    def forward(self, x):
        return self.then(self, self.layer(x))


def hiding(words, **more):
    return rows(words, BATCH, make=Hiding, **more)


def nan(h):
    return (h - h) / (h - h)


@hiding("cannot-tell", says=(DOUBTED, "div ("))
@hiding("cannot-tell", name="keeps_what_another_loss_may_read", loss=mean)
def kept_in_a_dict(model, h):
    model.memory["h"] = nan(h)
    return h


MAY_BE_DECIDED_BY_IT = {
    "checked beside": lambda _, h: torch.where(torch.isfinite(nan(h)) & (nan(h) > 0), h, -h),
    "chosen by argmax": lambda model, h: model.table(nan(h).argmax(-1)),
    "chosen among infinities": lambda model, h: model.table((h / (h - h)).argmax(-1)),
    "chosen by topk": lambda model, h: model.table(nan(h).topk(2).indices).sum(1),
    "made whole numbers": lambda model, h: model.table(nan(h).to(int).clamp(0, 4)),
    "compared": lambda model, h: torch.where(nan(h) > 0, h, -h),
    "asked by Python": lambda model, h: 2 * h if nan(h).mean().item() > 0 else h,
    "counted": lambda model, h: h * nan(h).count_nonzero(),
    "taken for true": lambda model, h: 2 * h if nan(h).any() else h,
}
for name, then in MAY_BE_DECIDED_BY_IT.items():
    hiding("cannot-tell", name=name, says=(DOUBTED, "div ("))(then)


@hiding("cannot-tell", says=("mul (",))
def kept_entropy(model, h):
    """NaN of a mere -inf is none that is meant; only a loss, which is not known, could read it."""
    zero = 0 * h.detach()
    model.memory["entropy"] = (zero * zero.log()).sum()
    return h


@hiding("cannot-tell", says=("log (",))
def decided_by_entropy(_model, h):
    zero = 0 * h.detach()
    return 2 * h if (zero * zero.log()).sum() > 0 else h


@hiding("cannot-tell", says=("in `table.weight`",))
def spoils_a_weight(model, h):
    model.table.weight.data = nan(h).mean() * model.table.weight.data
    return h


@hiding("healthy")
def masked(model, h):
    model.memory["mask"] = torch.full((4, 4), -math.inf).triu(1)
    model.memory["smallest"], model.memory["missing"] = torch.tensor(math.inf), torch.full((3,), math.nan)
    return (h + model.memory["mask"]).softmax(-1)


def squares(h):
    return (300 + h.abs()) * (300 + h.abs())


def weighed(h, degree):
    scale = degree.float() ** -0.5
    return h * degree * scale.masked_fill(scale == math.inf, 0.0)


INNOCENT = {
    "infinite and compared": lambda _, h: torch.where(h / (h - h) > 2, h, -h),
    "guarded": lambda _, h: h if not torch.isfinite(nan(h)).all() else 2 * h,
    "logarithms of zero": lambda model, h: model.table(torch.log(h.relu()).argmax(-1)),
    "asked for as a number": lambda _, h: weighed(h, (h == h.amax()).sum(-1, keepdim=True)),
    "overflow that decides as fp32 does": lambda _, h: h if squares(h).amax() > 1e4 else 2 * h,
}
for name, then in INNOCENT.items():
    hiding("healthy", name=name)(then)


@hiding("healthy")
def compared_in_an_assertion(_model, h):
    assert not (nan(h) > 50).any()
    return h


@hiding("healthy")
def chosen_for_nothing(model, h):
    model.memory["nearest"] = nan(h).argmax(-1).shape
    return h


hiding("cannot-tell", name="choice that only fp16 spoils", says=(OFF,))(
    lambda model, h: model.table((h.half() * 6e4 * 100).argmax(-1))
)


@hiding("cannot-tell", says=(OFF,))
def an_infinity_of_fp16_alone_is_asked_for(_model, h):
    last = squares(h).amax(-1, keepdim=True)
    return torch.where(last == math.inf, 0.0, h)


@hiding("cannot-tell", says=(OFF,))
def decided_otherwise_by_growth(_model, h):
    """No number that fp16 holds would have led to the decision that its Inf led to, or all of them would."""
    last = squares(h).amax()
    return h if not 2 * last > last else 2 * h


@hiding("cannot-tell", says=(OFF,))
def decided_otherwise_by_a_bound(_model, h):
    return 2 * h if squares(h).amax() < 1e6 else h


def doubled_if_small(output, _):
    return output.mean() * (2 if output.half().mul(1e5).abs().amax() < 1e8 else 1)


hiding("cannot-tell", name="loss that an overflow decides", loss=doubled_if_small)(lambda _model, h: h)


@hiding("cannot-tell", says=("99.9 % off fp32's under fp16 autocast",))
def output_far_from_fp32(_model, h):
    """Code that asks for an Inf is meant to get one, but what it returns then is not what fp32 returns."""
    return 2 * h if squares(h).isinf().any() else h


def says_where_it_begins(report):
    return report.headline.endswith(").") and "first more than 10 % off at add (hidden_values.py:" in report.headline


@hiding("cannot-tell", holds=says_where_it_begins)
def constant_that_half_precision_loses(_model, h):
    return (0 * h + 1e-9) / (0 * h.float() + 1e-9)


@rows("healthy", {"x": normal(8, 4)}, make=Hiding)
def other_random_numbers(_model, h):
    """torch draws other normal numbers in half precision."""
    return h + 9 * torch.randn_like(h)


@rows("silent . mul silent-overflow", {"x": normal(8, 4)}, make=Hiding)
def small_beside_a_large_output(_model, h):
    far = h * 400
    return far / (far * far).mean(-1, keepdim=True).sqrt(), far


@rows("cannot-tell", BATCH, make=Hiding, says=("log (",))
def kept_as_a_part_of_the_loss(model, h):
    model.part = h.sub(100).relu().sum().log()
    return h


@rows("cannot-tell", BATCH, says=("div (", "kept where the step does not read it"))
def kept_by_a_closure():
    kept = []

    def keep(_model, h):
        kept.append(nan(h.detach()))
        return h

    return Hiding(keep)


@hiding("cannot-tell", says=("div (",))
@hiding("cannot-tell", name="logs_a_number", loss=mean)
def leaves_torch(model, h):
    model.memory["mean"] = nan(h).mean().item()
    return h


@hiding("*", says=("Inf, and from it NaN,",))
def overflow_that_leaves_torch(model, h):
    squares = (h * 1000) ** 2
    model.memory["spread"] = (squares.half() - squares.half()).mean().item()
    return h


@hiding("cannot-tell", loss=mean)
def keeps_what_nothing_reads(model, h):
    model.memory["h"] = nan(h.detach())
    return h


@hiding("cannot-tell", loss=mean, says=("in `seen`",))
def keeps_in_a_buffer_what_nothing_reads(model, h):
    model.seen.copy_(nan(h.detach()))
    return h


class BestSoFar(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("nearest", torch.tensor(math.inf))

    def forward(self, x):
        far = torch.where(x > 9, 1.0, math.inf).to(x)
        far.diagonal().zero_()
        self.nearest = torch.minimum(self.nearest, far.mean())
        return super().forward(x) + torch.exp(-far)


rows("healthy", BATCH, loss=mean)(BestSoFar)


class Centred(nn.Module):
    """A loss that keeps a direction for its next call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output, batch):
        loss = (output - self.centre).square().mean()
        self.centre = nan(output.detach()).mean(0)
        return loss


rows("cannot-tell", BATCH, 4, 4, name="a loss that keeps NaN", loss=Centred())(nn.Linear)


@hiding("numerics . div division-by-zero", loss=mean, fix="none")
def keeps_in_a_buffer_what_the_next_step_reads(model, h):
    return keeps_in_a_buffer_what_nothing_reads(model, h * model.seen)


@hiding("numerics . div division-by-zero", loss=mean)
def keeps_in_a_buffer_what_evaluation_reads(model, h):
    return keeps_in_a_buffer_what_nothing_reads(model, h) if model.training else h + model.seen
