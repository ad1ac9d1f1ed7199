"""The backward that somebody wrote by hand, and code that TorchScript runs: their own lines are told."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from strangers.visits import Between, blamed, line, normal


class Root(torch.autograd.Function):
    """A root whose backward divides by its result."""

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
    """A backward that makes infinities and removes them by itself."""

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


class Applied(nn.Module):
    """A function of the squares of a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.function.apply(x.square() * self.scale)


def mean(output, _batch):
    return output.float().mean()


def with_zero_row():
    x = normal(4, 8)
    x[1] = 0
    return x


def make(function):
    model = Between(Applied(function))
    with torch.no_grad():
        model.entry.bias.zero_()
    return model


EXPECTED = {
    Root: ("div", "division-by-zero", "return half / root", (1,)),
    Log: ("exp", "exp-overflow", "slope = (-x.clamp_min(1e-6).log() * 80).exp()", (0, 1, 2, 3)),
}


@pytest.mark.parametrize("function", EXPECTED)
def test_the_line_in_a_backward_written_by_hand(examine, function):
    op, cause, text, samples = EXPECTED[function]
    report = examine(make(function), {"x": with_zero_row()}, loss=mean)
    assert blamed(report) == ("numerics", "middle", op, cause)
    assert (report.origin.phase, report.origin.function, line(report)) == ("backward", function.__name__, text)
    assert 1 in report.origin.elements.samples
    assert report.origin.elements.samples[:1] == samples[:1]


@pytest.mark.parametrize("function", [Root, Log])
def test_the_same_backward_where_nothing_is_wrong(examine, function):
    model = make(function)
    with torch.no_grad():
        model.entry.bias.fill_(3.0)
        model.entry.weight.mul_(0.1)
    assert blamed(examine(model, {"x": normal(4, 8)}, loss=mean)) == ("healthy",)


def test_what_a_backward_removes_by_itself_is_no_fault(examine):
    model = Between(Applied(Hidden))
    with torch.no_grad():
        model.entry.bias.zero_()
    report = examine(model, {"x": with_zero_row()}, loss=mean)
    assert blamed(report) == ("healthy",)


def test_a_backward_that_hands_on_what_it_kept(examine):
    report = examine(make(Stored), {"x": normal(4, 8)}, loss=mean)
    assert (report.origin.op, report.origin.function) == ("Stored", None)
    assert line(report) == "def backward(ctx, grad):"


def test_other_nodes_of_the_function_are_left_alone(examine):
    kept = Root.apply(torch.full((3,), 4.0, requires_grad=True))
    before = type(kept.grad_fn)._forward_cls
    examine(make(Root), {"x": with_zero_row()}, loss=mean)
    kept.sum().backward()
    assert type(kept.grad_fn)._forward_cls is before is Root
    assert "_forward_cls" not in vars(kept.grad_fn)


@torch.jit.script
def unit(x):
    length = (x * x).sum(-1, keepdim=True).sqrt()
    return x / length


class Scripted(nn.Module):
    """Rows of unit length, by a scripted function."""

    def forward(self, x):
        y = torch.relu(x)
        return unit(y)


class Centred(nn.Module):
    """A module to be scripted as a whole."""

    def forward(self, x):
        y = x - x.mean()
        if y.dim() > 5:
            y = y.flatten()
        return y / y.abs().max()


def dead(middle):
    """A model whose middle gets the same negative number everywhere."""
    model = Between(middle)
    with torch.no_grad():
        model.entry.weight.zero_()
        model.entry.bias.fill_(-1.0)
    return model


def test_the_line_in_a_scripted_function(examine):
    report = examine(dead(Scripted()), {"x": normal(4, 8)})
    assert blamed(report) == ("numerics", "middle", "div", "division-by-zero")
    assert line(report) == "return x / length"


def test_the_line_in_a_scripted_module(examine):
    report = examine(dead(torch.jit.script(Centred())), {"x": normal(4, 8)})
    assert blamed(report)[1:3] == ("middle", "div")
    assert line(report) == "return y / y.abs().max()"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_no_line_for_a_script_from_an_archive(examine, tmp_path):
    torch.jit.script(Centred()).save(tmp_path / "centred.pt")
    report = examine(dead(torch.jit.load(tmp_path / "centred.pt")), {"x": normal(4, 8)})
    assert blamed(report)[1:3] == ("middle", "div")
    assert report.origin.source is None


SCRIPT = """
import torch
from torch import nn

@torch.jit.script
def unit(x):
    return x / x.abs().max()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return unit(self.head(x) * 0)
"""


@pytest.mark.slow
def test_the_command_line_runs_scripts_as_python(tmp_path):
    """In a process of its own: torch reads when it is loaded whether scripts are compiled."""
    (tmp_path / "net.py").write_text(SCRIPT, encoding="utf-8")
    state = {"head.weight": torch.ones(4, 4), "head.bias": torch.ones(4)}
    torch.save({"state_dict": state, "x": torch.ones(2, 4)}, tmp_path / "dump.pth")
    command = [sys.executable, "-m", "nandoctor", "replay", "dump.pth", "--model", "net.py:Net", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    report = json.loads(done.stdout)
    source = report["origin"]["source"]
    assert (source["line"], source["column"], source["text"]) == (7, 11, "return x / x.abs().max()")
    assert any(item["kind"] == "source" and item["verified"] for item in report["fixes"])


def test_a_scripted_module_with_nothing_wrong(examine):
    report = examine(Between(torch.jit.script(Centred())), {"x": normal(4, 8)})
    assert blamed(report) == ("healthy",)


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


class Quantised(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.lift = nn.Linear(4, 6)
        self.step = nn.Parameter(torch.tensor(step))

    def forward(self, x):
        return Rounded.apply(self.lift(x), self.step)


@pytest.mark.parametrize(("step", "sick"), [(1e-5, True), (1e-3, False)])
def test_an_overflow_that_the_forward_keeps_for_the_backward(examine, step, sick):
    report = examine(Quantised(step), {"x": normal(5, 4)}, loss=mean)
    if not sick:
        assert report.verdict == "healthy"
        return
    assert (report.verdict, report.cause.code) == ("precision", "elementwise-overflow")
    assert report.origin.source.text == "steps = x / step"
    assert report.headline.endswith("the backward of Rounded turns that Inf into NaN")
