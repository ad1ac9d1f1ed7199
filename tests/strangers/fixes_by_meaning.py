"""What a fix keeps or replaces: unlike steps for each way in which a finite result can be wrong.

The labels say what the search gives, from the formula: a verified change of the code and its kind, or none.
"""

import torch
import torch.nn.functional as F
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
X = {"x": normal(4, 8)}
ZEROS = {"x": normal(4, 8).abs() * torch.tensor([[1.0], [0.0], [1.0], [1.0]])}
FAR = {"x": normal(4, 8) + torch.tensor([[0.0], [0.0], [300.0], [0.0]])}
IN_FP32 = {**X, "autocast": False}
DIVISION, RECIPROCAL = (f"numerics . {op} division-by-zero" for op in ("div", "reciprocal"))
DOMAIN, TRAP = "numerics . {} invalid-domain", "numerics . {} where-gradient-trap"


def squared(output, _batch):
    return (output.float() - 0.3).square().mean()


def lifted(name, words, batch, fix, step, **more):
    rows.lifted(words, batch, name=name, fix=fix, **{"loss": squared, **more})(step)


# --- a clamp of one term turns the gradient of the sum round


def a_learned_variance(output, batch):
    log_variance = output.float() - batch["x"]
    return (torch.exp(log_variance.neg()) * batch["x"].square() + log_variance).mean()


LEARNED = {"loss": a_learned_variance}
lifted("a_learned_variance", "numerics <loss> exp exp-overflow", FAR, "none", lambda h, x: h, **LEARNED)

# --- an exponential that two terms take


def density(output, batch):
    scale = torch.exp(output.float() + batch["x"])
    return (scale.log() + ((batch["x"] - 1) / scale).square()).mean()


lifted(
    "density",
    "numerics <loss> exp exp-overflow",
    {**FAR, "autocast": False},
    "verified together",
    lambda h, x: h,
    loss=density,
)

# --- an argument that the program puts outside a domain

lifted("far below", DOMAIN.format("log1p"), X, "none", lambda h, x: torch.log1p(h - 6.0))
lifted("negative base", DOMAIN.format("pow"), X, "none", lambda h, x: h + (x.mean(-1, keepdim=True) - 3.0) ** 1.5)
lifted("not normalised", DOMAIN.format("atanh"), X, "none", lambda h, x: torch.atanh(3.0 + h.square()))

# --- every bound changes what it says, and float64 holds it: a ratio of hyperbolic sines


@rows("numerics . sinh *", {"x": torch.tensor([[1.0, 1.5]])}, fix="verified keep-lines")
class Ratio(nn.Module):
    def forward(self, x):
        grown = torch.sinh(x * 100)
        return grown[:, 0] / grown[:, 1]


# --- 0 / 0 that has a limit: 1, 1 and a half, where terms cancel, in a mean, and beside 1e8; and one in each element

lifted("steepness", DIVISION, ZEROS, "verified guard", lambda h, x: h * (torch.tanh(x) / x))
lifted("Bose gas", DIVISION, ZEROS, "verified guard", lambda h, x: h * (x / (torch.exp(x) - 1)))
lifted("bending", DIVISION, ZEROS, "verified guard", lambda h, x: h * ((1 - torch.cos(x)) / x.square()))
lifted("mean", DIVISION, ZEROS, "verified guard", lambda h, x: h * ((1 - torch.cos(x)) / x.square()).mean())
lifted("weight", DIVISION, {**IN_FP32, "x": 1e8 * ZEROS["x"]}, "verified guard", lambda h, x: h + x.clamp(max=2) / x)
lifted("Box-Cox", DIVISION, ZEROS, "none", lambda h, x: h + ((1 + h.abs()) ** x - 1) / x)

# --- the same behind a ReLU, whose zeros no batch beside this one moves; a mean of nothing has nothing to tend to


def dose(h, x):
    rate = x.relu()
    return h * ((1 - torch.exp(-2.0 * rate)) / rate)


def mean_of_what_fires(h, x):
    fires = (x.relu() > 0).to(h)
    return (h * fires).sum(-1) / fires.sum(-1)


for step, change in ((dose, "guard"), (mean_of_what_fires, "*")):
    lifted(
        step.__name__, DIVISION, {"x": X["x"] - ZEROS["x"].eq(0) * 9.0, "autocast": False}, f"verified {change}", step
    )

# --- zeros that no batch beside this one moves: rounded and whole numbers, counts, an attribute


def chord(x):
    return (x.exp() - x.roll(1, 1).exp()) / (x - x.roll(1, 1))


def per_class(h, x):
    count = torch.bincount(torch.tensor([0, 0, 2]), minlength=8).to(h)
    return h * ((1 - 0.9**count) / count)


lifted("rounded", DIVISION, IN_FP32, "verified *", lambda h, x: h * (torch.sin(x.round()) / x.round()))
lifted("rounded apart", DIVISION, IN_FP32, "none", lambda h, x: h * chord(x.round()))
lifted("counts", DIVISION, IN_FP32, "verified guard", per_class)


@rows(DIVISION, IN_FP32, fix="verified guard", loss=squared)
class Taps(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.taps = torch.arange(-3.0, 5.0)

    def forward(self, x):
        return super().forward(x) * (torch.sin(2 * self.taps) / self.taps)


# --- a larger eps turns a gradient round that hardly shows beside another


@rows(
    "precision . div eps-underflow",
    {"x": 0.2 * ZEROS["x"].add(0.5) * ZEROS["x"].ne(0)},
    fix="verified keep*",
    loss=lambda made, _: 1e-2 * made[:, :4].mean() + 1e-3 * made[:, 4:].mean(),
)
class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(8, 4), nn.Linear(8, 4, bias=False)
        self.small.weight.data.abs_().add_(0.1)

    def forward(self, x):
        h = self.small(x) * 0.02
        return torch.cat([self.large(x).float() * 100 + 300, h / (h * h + 1e-8) * 1e-3], -1)


# --- a logarithm of a sum of exponentials, times what is positive; a variance of large values


def mixture(output, batch):
    near = torch.exp(-0.5 * (output.float() - batch["x"]).square())
    return -torch.log((batch["x"].detach().softmax(-1) * near).sum(-1)).mean()


def partial_likelihood(output, batch):
    risk = (output.float() + batch["x"]).sum(-1)
    return (torch.log(torch.cumsum(torch.exp(risk), 0)) - risk).mean()


def free_energy(output, batch):
    return torch.log(torch.exp(output.float() + batch["x"]).mean())


def spread(h, x):
    far = x + 500.0
    return h + torch.sqrt(far.square().mean(-1, keepdim=True) - far.mean(-1, keepdim=True) ** 2)


for loss in (mixture, partial_likelihood, free_energy):
    batch = {**FAR, "autocast": False}
    lifted(loss.__name__, "numerics <loss>", batch, "verified stable-log", lambda h, x: h, loss=loss)
lifted("spread", DOMAIN.format("sqrt"), {"x": 1e-3 * X["x"], "autocast": False}, "verified stable-variance", spread)


def splatted(h, x):
    weight = torch.exp(x)
    moved, total = torch.stack([h * weight, weight]).sum(-1)
    return moved / torch.where(total == 0, 1.0, total)


lifted("splatted", "numerics . exp exp-overflow", FAR, "none", splatted)

# --- branches of a where that are singular in several places; an edge at which 0 would be wrong, and one that is near


def branches(h, x):
    size = h.abs() + 0.5
    return h + torch.where(
        size > 1,
        2 / (size**2 - 1).sqrt() * ((size - 1) / (size + 1)).sqrt().arctan(),
        2 / (1 - size**2).sqrt() * ((1 - size) / (1 + size)).sqrt().arctanh(),
    )


def distance(h, x):
    return torch.acosh(1 + 2 * x.square().sum(-1) * (1 + h.square().mean(-1)))


def phase(output, batch):
    wave = torch.complex(output.float(), batch["x"]) * torch.where(batch["x"] == 0, 1e-24, 1.0)
    return (wave.abs() * torch.exp(1j * torch.angle(wave)) - 1).abs().square().mean()


lifted(
    "phase",
    "numerics <loss> angle gradient-singularity",
    {**ZEROS, "autocast": False},
    "verified clamp",
    lambda h, x: h,
    says=("The derivative of `torch.angle(wave)` is infinite",),
    loss=phase,
)
lifted("branches", TRAP.format("sqrt"), IN_FP32, "verified together", branches)
lifted("distance", "numerics . acosh gradient-singularity", ZEROS, "verified guard", distance)

# --- an angle of exactly 0, whose sine has no slope there, and which `where` keeps


@rows(
    "numerics . sqrt gradient-singularity",
    {"x": 2 * torch.eye(4, 8), "label": torch.arange(4)},
    phase="backward",
    loss=lambda output, batch: F.cross_entropy(30 * output.float(), batch["label"]),
    fix="none",
)
class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.proxy = nn.Parameter(torch.eye(5, 8))

    def forward(self, x, label):
        cosine = F.linear(F.normalize(x), F.normalize(self.proxy))
        sine = torch.sqrt(1.0 - cosine.pow(2))
        margin = torch.where(cosine > -0.9, cosine * 0.96 - sine * 0.28, cosine - 0.1)
        return torch.where(F.one_hot(label, 5) > 0, margin, cosine)


# --- a box that is found exactly: whether it is a little too small decides where the gradient points


def missed(sizes, batch):
    common = torch.minimum(sizes, batch["wanted"]) / torch.maximum(sizes, batch["wanted"])
    off = (sizes.log() - batch["wanted"].log()).square()
    share = (off / (1 - common + off)).detach()
    return (1 - common + share * off).mean()


@rows(
    "numerics <loss> div division-by-zero",
    {**X, "wanted": X["x"].exp() * torch.tensor([[1.0], [1.3], [1 / 1.3], [1.0]])},
    loss=missed,
    fix="verified clamp",
)
class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.factor).exp()


# --- one of several arguments has an infinite gradient at 0


def to_a_share(output, batch):
    share = output.float().square() * (batch["x"] > 0)
    return F.kl_div(batch["x"].log_softmax(-1), share, reduction="batchmean")


lifted(
    "share", "numerics <loss> kl_div gradient-singularity", IN_FP32, "verified clamp", lambda h, x: h, loss=to_a_share
)

# --- no limit: the formula is infinite, or depends on the side; a scale of weights that are 0 needs a floor itself

lifted("direction of nothing", DIVISION, ZEROS, "none", lambda h, x: h * (x / x.norm(dim=-1, keepdim=True)))


@rows(DIVISION, ZEROS, fix="none")
class PhaseOfSilence(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.eye(8, dtype=torch.complex64))

    def forward(self, x):
        wave = torch.complex(x, x.roll(1, -1)) @ self.mix
        phase = wave / wave.abs()
        return (phase * phase.roll(1, -1).conj()).real


lifted(
    "bin",
    "numerics . log log-of-zero",
    FAR,
    "none",
    lambda h, x: h + torch.log(torch.sigmoid(x) - torch.sigmoid(x - 1)),
)


@rows(DIVISION, X, loss=squared, fix="verified clamp")
class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.shift = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        scale = self.shift.detach().abs().amax() / 127
        whole = self.shift / scale
        whole = whole + (whole.round() - whole).detach()
        return self.lift(x) + whole * scale


# --- acos is pi at -1, which a guard would take away, and 0 at 1: only the edge that is met is guarded

AT_ONE = {"name": "at one", "says": ("The derivative of `torch.acos(x * self.scale)` is infinite, so",)}


@rows("numerics . acos *", {"x": torch.tensor([[-1.0, 0.5]])}, loss=squared, fix="verified clamp")
@rows("numerics . acos *", {"x": torch.tensor([[1.0], [0.5]])}, loss=squared, fix="verified guard", **AT_ONE)
class Angle(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.acos(x * self.scale)


# --- what is made up is hidden by what follows, or fp32 is wrong itself


def one_pass_variance(h, x):
    level = h + 5e4
    return torch.sqrt(((level * level).mean(-1) - level.mean(-1) * level.mean(-1)).abs() + 1.0)


lifted("nearest", RECIPROCAL, ZEROS, "none", lambda h, x: h * torch.softmax(1 / x, -1))
lifted("shift", RECIPROCAL, ZEROS, "verified guard", lambda h, x: F.layer_norm(h + (1 / x).sum(-1, keepdim=True), (8,)))
lifted("one pass", "precision . mul elementwise-overflow", X, "none", one_pass_variance)

# --- the code itself says what the value is: an assignment, by index or by mask


def logarithm_by_index(h, x):
    made = torch.log(h.abs() * (x > 0))
    made[torch.isinf(made)] = 0.0
    return made + x


def logarithm_by_mask(h, x):
    made = torch.log(h.abs() * (x > 0))
    return made.masked_fill_(made == -torch.inf, 0.0) + x


def degree_by_limit(h, x):
    made = (h.abs() * (x > 0)).pow(-0.5)
    made[made > 1e30] = 0.0
    return made + x


for op, step in (("log", logarithm_by_index), ("pow", degree_by_limit), ("log", logarithm_by_mask)):
    lifted(step.__name__, TRAP.format(op), IN_FP32, "verified guard", step)

# --- right changes: a loss of almost nothing, an eps beside zeros, a mask of -1e4 that differs in padding


def of_a_sure_answer(output, _batch):
    return F.cross_entropy(output.float(), output.argmax(-1))


def unit(h, x):
    h = h - h[1]
    return h / (h.abs().amax(-1, keepdim=True) + 1e-9)


def padded(h, x):
    there = torch.arange(5) < torch.tensor([[5], [3]])
    scores = (h @ h.mT) + (~(there[:, :, None] & there[:, None])).to(h) * -1e9
    return (torch.softmax(scores, -1) @ h) * there[..., None]


SURE = "precision . mul elementwise-overflow"
lifted("sure", SURE, X, "verified keep-op", lambda h, x: h * 3e5 / 3e3, loss=of_a_sure_answer)
lifted("padded", "precision . * mask-constant-overflow", {"x": normal(2, 5, 8)}, "verified *", padded)
lifted("unit", "precision . div eps-underflow", X, "verified *", unit)

# --- the text is the edit: dimensions and keywords as they stand

PADDED = {"x": normal(3, 4, 8) * torch.tensor([1.0, 0.0, 1.0])[:, None, None]}


def masked(h, x):
    return h[..., :1].masked_fill((x == 0).all(-1, keepdim=True), -torch.inf)


def of_the_input(h, x):
    scores = masked(h, x).mT
    return torch.softmax(input=scores, dim=2) @ x


UNMASKED = "numerics . softmax fully-masked-softmax"
lifted("of_the_input", UNMASKED, PADDED, "verified unmask-rows", of_the_input, samples=(1,))

# --- a mask comes too late, by its condition, as its fill and as a factor; and for a softmax by hand


def kept(h, x):
    grown = torch.exp(x + h)
    return torch.where(x < 100, grown, h)


def filled(h, x):
    grown = torch.exp(x + h) + 1
    return grown.masked_fill(x > 100, 0.0)


def factor(h, x):
    grown = torch.exp(x + h)
    near = (x < 100).to(h)
    return grown * h * near


def by_hand(h, x):
    scores = masked(h, x)
    powers = torch.exp(scores - scores.max(1, keepdim=True).values)
    return (powers / powers.sum(1, keepdim=True) * x).sum(1)


for step in (kept, filled, factor):
    lifted(step.__name__, "numerics . exp *", FAR, "verified mask-first", step, samples=(2,))
lifted("by hand", "numerics . sub indeterminate-form", PADDED, "verified set-argument", by_hand, samples=(1,))

# --- what float64 rounds to 0 as well, and smaller inputs show

lifted("tail", "numerics . log log-of-zero", FAR, "verified stable-log", lambda h, x: h + torch.log(torch.erfc(x / 30)))

# --- a derivative that is differentiated again, and is singular itself


def slope_of_sinc(h, x):
    (slope,) = torch.autograd.grad(torch.sinc(h * x).sum(), h, create_graph=True)
    return slope


lifted("a_slope_of_sinc", TRAP.format("div"), ZEROS, "none", slope_of_sinc)


# Unchanged, what fp16 rounds off both happens to cancel in the second sample.
NEAR = {"x": torch.tensor([[1e5], [1.19]]), "y": torch.tensor([[1.19], [1.19]])}


@rows("precision shown linear *", NEAR, inputs="x,y", fix="verified keep-module")
class Difference(nn.Module):
    def __init__(self):
        super().__init__()
        self.shown, self.taken = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.shown.weight, 1.0173)
        nn.init.constant_(self.taken.weight, 1.0017)

    def forward(self, x, y):
        return (self.shown(x).float() - self.taken(y).float()).clamp(max=1)


BLANK = {"x": normal(5, 6).index_fill(0, torch.tensor(2), 0.0)}


@rows(
    "numerics . sqrt *", BLANK, 6, 6, False, loss=squared, fix="verified clamp", name="at a loss scale", loss_scale=32.0
)
class Norm(nn.Linear):
    def forward(self, x):
        return super().forward(x).float().square().sum(1).sqrt()


rows("numerics . sqrt *", BLANK, 6, 6, False, name="in bf16", fix="verified clamp", loss=squared, amp_dtype="bfloat16")(
    Norm
)


# --- what is 0 throughout is a number too

BLANK = {"x": torch.zeros(4, 8), "autocast": False}
lifted("blank", DIVISION, BLANK, "verified guard", lambda h, x: h + torch.sin(x) / x)

# --- two lines of a loop, and weights of the loss


def transported(h, x):
    """Two lines of a loop overflow in fp16, one after the other, and one reads a transposed view."""
    far = -13.0 * (torch.arange(4) == 2)
    kernel, v = torch.exp(far + far[:, None] + 0.1 * h @ x.t()), torch.ones_like(h[:, :1])
    for _ in range(3):
        u = 1 / (kernel @ v)
        v = 1 / (kernel.mT @ u)
    return u * kernel * v.mT


lifted("transported", "precision", X, "verified together", transported)


CENTER = nn.Parameter(torch.zeros(8))


def to_center(output, _batch):
    return (output.float() - CENTER).square().mean() + CENTER.square().sum().sqrt()


lifted("center", "numerics <loss> sqrt gradient-singularity", IN_FP32, "verified clamp", lambda h, x: h, loss=to_center)


@rows("numerics . acos gradient-singularity", {"x": normal(4, 3)}, loss=squared, fix="none")
class Turned(nn.Module):
    """No rotation, as a quaternion: with acos off its edge the value stays, and the gradient is 1e5 times too large."""

    def __init__(self):
        super().__init__()
        self.rotation = nn.Parameter(torch.tensor([1.0, 0.0, 0.0, 0.0]))

    def forward(self, x):
        unit = F.normalize(self.rotation, dim=-1)
        norm = unit[1:].norm(dim=-1, keepdim=True).clamp(min=1e-8)
        twist = unit[1:] * torch.acos(unit[:1].clamp(-1.0, 1.0)) / norm
        return x + 2 * torch.linalg.cross(twist.expand_as(x), x)


# --- nothing to average, as one more summand or in a difference; eigenvectors that a number put for a zero tells apart


def margin(output, _batch):
    clicked = torch.tensor([[True, False] * 4, [False] * 8, [True] * 4 + [False] * 4, [False, True] * 4])
    pairs = [(row[mask].mean(), row[~mask].mean()) for row, mask in zip(output, clicked, strict=True)]
    return -torch.stack([F.logsigmoid(ours - others) for ours, others in pairs]).mean()


lifted("margin", "numerics <loss> mean empty-reduction", IN_FP32, "none", lambda h, x: h, loss=margin)
PATCH = torch.tensor([[x, y, 0.0] for x in (-1.0, 0.0, 1.0) for y in (-1.0, 0.0, 1.0)])


PATCHES = {"x": torch.stack([PATCH, normal(9, 3)])}


@rows("numerics . linalg_eigh gradient-singularity", PATCHES, loss=squared, fix="none")
class Normals(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((9,), 0.5))

    def forward(self, x):
        return torch.linalg.eigh(torch.einsum("n,bni,bnj->bij", self.weight, x, x)).eigenvectors[..., 0]


# --- a limit that is one sample's own: the mean temperature of two streams, which are equally warm in one of them

HOT = 10.0 + 20.0 * torch.rand(6, generator=torch.Generator().manual_seed(0))
STREAMS = {"hot": HOT, "cold": torch.where(torch.arange(6) == 2, HOT, HOT / 2), "autocast": False}


@rows("numerics . div division-by-zero", STREAMS, loss=squared, fix="none")
class Exchanger(nn.Module):
    def __init__(self):
        super().__init__()
        self.transfer = nn.Linear(1, 1)

    def forward(self, hot, cold):
        return self.transfer(((hot - cold) / (torch.log(hot) - torch.log(cold)))[:, None]).squeeze(1)


# --- in a batch twice as bright the divisor is infinite too, and hides in the quotient

BRIGHT = {"x": normal(4, 8), "clean": 190.0 + normal(4, 8)}


def likeness(output, batch):
    x, y = (180.0 + output.sigmoid()).half(), batch["clean"].half()
    common = 2 * x * y
    return (common / (y * y)).mean()


lifted(
    "likeness", "precision <loss> mul elementwise-overflow", BRIGHT, "*", lambda h, x: h, loss=likeness,
    holds=lambda it: not any(one.verified and "y.float() * y.float()" not in one.patch for one in it.fixes),
)  # fmt: skip
