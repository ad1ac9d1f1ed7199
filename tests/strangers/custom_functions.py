"""The backward that somebody wrote by hand, and code that TorchScript runs: their own lines are told."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from strangers.rows import Rows
from strangers.visits import Between, mean, normal

rows = Rows()


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (root,) = ctx.saved_tensors
        half = grad * 0.5
        return half / root


class Log(torch.autograd.Function):
    """A logarithm of a probability, with the slope taken in an exponent."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp_min(1e-6).log()

    @staticmethod
    def vjp(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = (-x.clamp_min(1e-6).log() * 80).exp()
        return grad * slope


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad / x.sqrt(), 0.0)


class Stored(torch.autograd.Function):
    """A backward that hands on what the forward has left: no op in it makes anything non-finite."""

    @staticmethod
    def forward(ctx, x):
        ctx.slope = torch.tensor(float("inf"))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return ctx.slope.expand_as(grad)


PLAIN = {"x": normal(4, 8)}
ZERO_ROW = {"x": normal(4, 8) * torch.tensor([1.0, 0, 1, 1])[:, None]}


def in_function(function, samples):
    def holds(report):
        found = report.origin.elements.samples
        return report.origin.function == function and 1 in found and found[:1] == samples

    return holds


@rows(
    "numerics middle div division-by-zero",
    ZERO_ROW,
    Root,
    phase="backward",
    line="return half / root",
    holds=in_function("Root", (1,)),
    loss=mean,
    fix="none",
)
@rows(
    "numerics middle exp exp-overflow",
    ZERO_ROW,
    Log,
    phase="backward",
    line="slope = (-x.clamp_min(1e-6).log() * 80).exp()",
    holds=in_function("Log", (0,)),
    loss=mean,
)
@rows("healthy", PLAIN, Log, 3.0, loss=mean)
@rows("healthy", ZERO_ROW, Hidden, loss=mean)
@rows(
    "* * Stored",
    PLAIN,
    Stored,
    line="def backward(ctx, grad):",
    holds=lambda report: report.origin.function is None,
    loss=mean,
)
def applied(function, bias=0.0):
    model = Between(Squares(function))
    with torch.no_grad():
        model.entry.bias.fill_(bias)
        model.entry.weight.mul_(0.1 if bias else 1.0)
    return model


class Squares(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.function.apply(x.square() * self.scale)


@torch.jit.script
def unit(x):
    length = (x * x).sum(-1, keepdim=True).sqrt()
    return x / length


class Scripted(nn.Module):
    def forward(self, x):
        y = torch.relu(x)
        return unit(y)


class Centred(nn.Module):
    def forward(self, x):
        y = x - x.mean()
        if y.dim() > 5:
            y = y.flatten()
        return y / y.abs().max()


def scripted():
    return torch.jit.script(Centred())


def archived():
    with tempfile.TemporaryDirectory() as folder:
        scripted().save(Path(folder, "centred.pt"))
        return torch.jit.load(Path(folder, "centred.pt"))


@rows("numerics middle div division-by-zero", PLAIN, Scripted, line="return x / length")
@rows("* middle div", PLAIN, scripted, line="return y / y.abs().max()")
@rows("* middle div", PLAIN, archived, line=None, ignores=("`torch.jit:DeprecationWarning",))
def dead(make):
    """A model whose middle gets the same negative number everywhere."""
    model = Between(make())
    with torch.no_grad():
        model.entry.weight.zero_()
        model.entry.bias.fill_(-1.0)
    return model


rows("healthy", PLAIN, name="scripted module with nothing wrong")(lambda: Between(scripted()))


class Rounded(torch.autograd.Function):
    """Rounds to steps, few of them: what overflows in the forward is clamped there, and kept for the backward."""

    @staticmethod
    def forward(ctx, x, step):
        steps = x / step
        ctx.save_for_backward(steps, step)
        return steps.round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx, grad):
        steps, step = ctx.saved_tensors
        inside = (steps.abs() <= 7).to(grad.dtype)
        off = (steps.round() - steps) * inside
        return grad * inside, (grad * off).sum().to(step.dtype).reshape(step.shape)


KEPT = "the backward of Rounded turns that Inf into NaN"


@rows("precision * * elementwise-overflow", {"x": normal(5, 4)}, 1e-5, line="steps = x / step", says=(KEPT,), loss=mean)
@rows("healthy", {"x": normal(5, 4)}, 1e-3, loss=mean)
class Quantised(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.lift = nn.Linear(4, 6)
        self.step = nn.Parameter(torch.tensor(step))

    def forward(self, x):
        return Rounded.apply(self.lift(x), self.step)
