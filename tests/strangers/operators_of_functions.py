"""flex_attention and torch.cond take functions; scripts have no Python caller; some devices lack a backward pass."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from strangers.rows import Rows
from strangers.visits import mean, normal

rows = Rows()
SEQUENCE, BATCH = {"x": normal(2, 16, 8)}, {"x": normal(4, 8)}
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


class Scaled(nn.Module):
    """A module to be scripted, with nothing of Python around it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

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
