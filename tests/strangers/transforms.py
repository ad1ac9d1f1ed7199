"""torch.func, parametrizations, hooks, ops that take functions, and scripts: what runs a forward from elsewhere."""

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.attention.flex_attention import flex_attention

from strangers.rows import Rows
from strangers.visits import mean, mean_square, normal

rows = Rows()
BATCH = {"x": normal(4, 8)}
DIVISION = "numerics . div division-by-zero"
WITH_BACKWARD = {"loss": mean_square, "holds": lambda report: not report.bad_gradients}


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)


@rows("healthy", BATCH, **WITH_BACKWARD)
class PerSampleGradients(Layered):
    """As private training and meta learning take them."""

    def forward(self, x):
        def energy(weights, row):
            return functional_call(self.inner, weights, (row,)).square().sum()

        weights = dict(self.inner.named_parameters())
        slopes = vmap(grad(energy), in_dims=(None, 0))(weights, x)
        return self.head(slopes["bias"])


@rows("numerics 0 div division-by-zero", BATCH, ignores=(".*spectral_norm",))
def dead_weight_with_its_norm_in_a_hook():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight_orig.zero_()
    return model


@rows("numerics . linalg_slogdet log-of-zero", BATCH)
class Determinant(Layered):
    def forward(self, x):
        return self.head(x), torch.linalg.slogdet(0 * self.inner.weight.float())[1]


@rows(DIVISION, BATCH, grad, line="(rows - rows).sum()")
@rows(DIVISION, BATCH, lambda f: lambda x: jvp(f, (x,), (x,))[1], name="jvp", line="(rows - rows).sum()")
@rows(DIVISION, BATCH, jacrev, line="(rows - rows).sum()")
class InsideATransform(Layered):
    def __init__(self, transform):
        super().__init__()
        self.transform = transform

    def forward(self, x):
        slope = self.transform(lambda rows: (self.inner(rows) / (rows - rows).sum()).float().sum())(x)
        return self.head(x) + slope.sum()


@rows("numerics . _unpack_dual -", BATCH)
class ForwardModeAtASingularPoint(Layered):
    def forward(self, x):
        return self.head(x) + jvp(lambda rows: (0 * self.inner(rows)).sqrt(), (x,), (x,))[1].sum()


@rows("precision inner linear matmul-overflow", {"x": 100 * normal(4, 8)}, says=("fp16 stops at",))
class Ensemble(Layered):
    """vmap adds the bias in fp32 to a product that fp16 could not hold."""

    def forward(self, x):
        weights = torch.stack([self.inner.weight, 3e4 * self.inner.weight])
        return vmap(lambda weight: functional_call(self.inner, {"weight": weight}, (x,)))(weights).mean(0)


# --- flex_attention and torch.cond take functions; scripts have no Python caller; some devices lack a backward pass


SEQUENCE = {"x": normal(2, 16, 8)}
MUL = ". mul elementwise-overflow"
FLEX = {"ignores": ("flex_attention called without", ":DeprecationWarning", "The .grad attribute")}
NO_BACKWARD = "The gradients could not be computed on this device. The model's forward raised NotImplementedError"


def huge(score, b, h, q, k):
    return score * 1e38 * 1e3


def relative(score, b, h, q, k):
    return score + (q - k)


@rows(f"precision {MUL}", SEQUENCE, None, 1e6, line="return flex_attention(q, q, q, score_mod=self.modify) *", **FLEX)
@rows(f"numerics {MUL}", SEQUENCE, huge, line="return score * 1e38 * 1e3", **FLEX)
@rows("healthy", SEQUENCE, relative, **FLEX)
@rows("cannot-tell", SEQUENCE, name="without a backward", says=(NO_BACKWARD,), loss=mean, **FLEX)
@rows("precision", SEQUENCE, None, 1e6, name="sick without a backward", says=(NO_BACKWARD,), loss=mean, **FLEX)
class Attending(nn.Module):
    """Attention whose output is scaled, by scores that `modify` may change."""

    def __init__(self, modify=None, scale=1.0):
        super().__init__()
        self.entry, self.modify, self.scale = nn.Linear(8, 8), modify, scale

    def forward(self, x):
        q = self.entry(x).unsqueeze(1)
        return flex_attention(q, q, q, score_mod=self.modify) * self.scale


CHOICE = "return torch.cond(x.sum() > -1e9, lambda h: h * 1e6, lambda h: h * 2.0, (x,))"


@rows.between("precision middle mul elementwise-overflow", BATCH, line=CHOICE, **FLEX)
def branch_of_cond(x):
    return torch.cond(x.sum() > -1e9, lambda h: h * 1e6, lambda h: h * 2.0, (x,))


@rows("cannot-tell", BATCH, 8, 8, says=("The model's backward pass raised RuntimeError",), loss=mean)
class BackwardThatRaises(nn.Linear):
    def forward(self, x):
        return torch.sparse.mm(torch.eye(4).to_sparse(), super().forward(x).float())


class Scaled(Layered):
    def forward(self, x):
        h = self.inner(x)
        return h * 1e6


@rows("* * mul elementwise-overflow", BATCH, torch.jit.script, line="return h * 1e6", **FLEX)
@rows("* * mul elementwise-overflow", BATCH, torch.jit.trace, BATCH["x"], name="trace", line="return h * 1e6", **FLEX)
def model_that_is_a_script(compiled, *example):
    return compiled(Scaled(), *example)


class Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e6


@rows("* * Wide gradient-overflow", BATCH, 8, 8, loss=lambda output, _: output.sum())
class Widening(nn.Linear):
    """The gradient does not fit what a function took."""

    def forward(self, x):
        return Wide.apply(super().forward(x))
