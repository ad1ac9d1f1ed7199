"""Stable forms of logarithms, quotients, shares and variances: what is written, and what may mean another thing."""

import ast
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from written import step_of

from nandoctor.changes.definitions import Definitions
from nandoctor.changes.editor import Editor
from nandoctor.changes.expression import number_in
from nandoctor.changes.largest_exponent import subtractions
from nandoctor.changes.log_space import StableLog
from nandoctor.changes.places import site_of
from nandoctor.changes.source_tree import parse_source
from nandoctor.changes.variance import StableVariance
from nandoctor.engine.runner import CLOSELY
from nandoctor.fixes.writing import ChangeWriter

WRITTEN = {
    "log of softmax": ("return torch.log(x.softmax(-1))", "log", ["return torch.log_softmax(x, -1)"]),
    "log of sigmoid": ("return torch.sigmoid(x).log()", "log", ["return F.logsigmoid(x)"]),
    "log of the rest": ("return torch.log(1 - torch.sigmoid(x))", "log", ["return F.logsigmoid(-x)"]),
    "log1p of the rest": ("return torch.log1p(-torch.sigmoid(x))", "log1p", ["return F.logsigmoid(-x)"]),
    "log of 1 minus exp": (
        "h = -x.abs() - 1\nreturn torch.log(1 - torch.exp(h))", "log", ["return torch.log(-torch.expm1(h))"],
    ),
    "softplus": ("return torch.log(1 + torch.exp(x))", "log", ["return F.softplus(x)"]),
    "almost 1": ("return torch.log(x.exp() + 1.00001)", "log", ["return F.softplus(x - 9.99995e-06) + 9.99995e-06"]),
    "softplus by log1p": ("return x.exp().log1p()", "log1p", ["return F.softplus(x)"]),
    "sigmoid": ("return 1 / (1 + torch.exp(-x))", "reciprocal", ["return torch.sigmoid(x)"]),
    "a share of a sigmoid": ("return x / (1 + torch.exp(x))", "div", ["return x * torch.sigmoid(-x)"]),
    "a share of a difference": (
        "s = torch.exp(x)\nreturn (x - 2) / s", "div", ["return (x - 2) * torch.exp(-x)"],
    ),
    "softmax": ("w = x.exp()\nreturn w / w.sum(-1, keepdim=True)", "div", ["return torch.softmax(x, -1)"]),
    "softmax in a lambda": (
        "share = lambda s: s.exp() / s.exp().sum(-1, keepdim=True)\nreturn share(x)", "div",
        ["share = lambda s: torch.softmax(s, -1)"],
    ),
    "shares": (
        "w = x.exp()\nreturn (w * x).sum(-1) / w.sum(-1)", "exp",
        ["w = (x - x.amax(-1, keepdim=True).clamp(min=0).detach()).exp()"],
    ),
    "shares of a masked sum": (
        "w = x.exp() * (x > 0)\nreturn w / (w.sum(-1, keepdim=True))", "exp",
        ["w = (x - x.amax(-1, keepdim=True).clamp(min=0).detach()).exp() * (x > 0)"],
    ),
    "shares by a product": (
        "w = x.exp()\nw = w * (1 / w.sum(-1, keepdim=True))\nreturn w if w.dim() else None", "exp",
        ["w = (x - x.amax(-1, keepdim=True).clamp(min=0).detach()).exp()"],
    ),
    "shares with an eps": (
        "w = x.exp()\nreturn w / (w.sum(1, keepdim=True) + 1e-8)", "exp",
        ["w = (x - x.amax(1, keepdim=True).clamp(min=0).detach()).exp()"],
    ),
    "a normal distribution": (
        "z = x / 2\nreturn torch.log(0.5 * (1 + torch.erf(z)))", "log",
        ["return -0.69314718 + torch.special.log_ndtr(z * 1.4142136) + 0.69314718"],
    ),
    "its upper tail": (
        "return torch.log(torch.erfc(x) * (1 - torch.erf(x / 2)))", "log",
        ["return torch.special.log_ndtr(x * -1.4142136) + 0.69314718"
         " + torch.special.log_ndtr((x / 2) * -1.4142136) + 0.69314718"],
    ),
    "a distribution's probabilities": (
        "chosen = torch.distributions.Categorical(logits=x)\nreturn torch.log(chosen.probs[:, 0])", "log",
        ["return chosen.logits[:, 0].clone()"],
    ),
    "over several statements": (
        "score = x * 2\ndensity = torch.exp(score)\ntotal = density.sum(dim=-1)\nreturn -torch.log(total)", "log",
        ["return -torch.logsumexp(score, dim=-1)"],
    ),
    "a call is made once": (
        "p = F.softmax(F.gelu(x), dim=-1)\nreturn -(p * torch.log(p)).sum(-1)", "log",
        ["logits = F.gelu(x)", "p = F.softmax(logits, dim=-1)",
         "return -(p * torch.log_softmax(logits, dim=-1)).sum(-1)"],
    ),
    "both logarithms of a statement": (
        "p = torch.sigmoid(x * 2)\nreturn 0.1 * p.log() + 0.9 * (1 - p).log()", "log",
        ["return 0.1 * F.logsigmoid(x * 2) + 0.9 * F.logsigmoid(-(x * 2))"],
    ),
    "a computed constant": (
        "density = torch.exp(-x) / (x.exp() * (2 * torch.pi) ** 0.5)\nreturn density.log()", "log",
        ["return -x - (x + 0.91893853)"],
    ),
    "two exponentials": ("return torch.log(x.exp() + (2 * x).exp())", "log", ["return torch.logaddexp(x, 2 * x)"]),
    "log of a product": ("return x.sigmoid().prod(dim=1).log()", "log", ["return F.logsigmoid(x).sum(dim=1)"]),
    "inverse of a softplus": (
        "return torch.log(torch.exp(x.abs() + 1) - 1)", "log",
        ["logits = x.abs() + 1", "return logits + torch.log(-torch.expm1(-logits))"],
    ),
    "tanh": (
        "return (x.exp() - (-x).exp()) / (x.exp() + (-x).exp())", "div",
        ["return torch.exp(x - torch.logaddexp(x, -x)) - torch.exp(-x - torch.logaddexp(x, -x))"],
    ),
    "log of i0": (
        "return torch.log(torch.special.i0(x))", "log", ["return torch.log(torch.special.i0e(x)) + x.abs()"],
    ),
    "log of cosh": ("return torch.log(torch.cosh(x))", "log", ["return torch.logaddexp(x, -x) - 0.69314718"]),
    "a squashed action": (
        "a = torch.tanh(x)\nreturn torch.log(1 - a ** 2).sum(-1)", "log",
        ["return (-2 * (torch.logaddexp(x, -x) - 0.69314718)).sum(-1)"],
    ),
    "a squashed action by a product": (
        "a = x.tanh()\nreturn a - torch.log(1 - a * a)", "log",
        ["return a - (-2 * (torch.logaddexp(x, -x) - 0.69314718))"],
    ),
    "a diagonal": (
        "e = torch.exp(x @ x.t() / 9)\nreturn -torch.log(torch.diag(e) / e.sum(dim=1))", "log",
        ["logits = x @ x.t() / 9", "return -(torch.diag(logits) - torch.logsumexp(logits, dim=1))"],
    ),
    "a condition": (
        "p = torch.exp(x if self.training else x * 2)\nreturn torch.log(p * torch.exp(x)).sum(-1)", "log",
        ["return ((x if self.training else x * 2) + x).sum(-1)"],
    ),
    "reciprocals": (
        "y = x.sigmoid()\nreturn -(y.reciprocal() + (1 - y).reciprocal()).log()", "log",
        ["return -torch.logaddexp(-F.logsigmoid(x), -F.logsigmoid(-x))"],
    ),
    "a sum with an eps": (
        "return torch.log(x.exp().sum(-1) + 1e-6)", "log",
        ["return F.softplus(torch.logsumexp(x, -1) + 13.815511) - 13.815511"],
    ),
    "a mean": (
        "return torch.log(x.exp().mean(-1))", "log",
        ["return torch.logsumexp(x, -1) - torch.log(torch.ones_like(x).sum(-1))"],
    ),
    "a running sum": ("return torch.log(x.exp().cumsum(1))", "log", ["return torch.logcumsumexp(x, 1)"]),
    "a mixture": (
        "return torch.log((F.softplus(x) * torch.exp(-x)).sum(-1))", "log",
        ["return torch.logsumexp(torch.log(F.softplus(x)) + -x, -1)"],
    ),
    "a masked sum": (
        "m = (x > x.amin()).to(x.dtype)\nreturn torch.log((x.exp() * m).sum(-1))", "log",
        ["return torch.logsumexp(x + torch.log(m), -1)"],
    ),
    "a variance": (
        "m = x.mean(-1, True)\nv = (x * x).mean(-1, True) - m ** 2\nreturn v.sqrt()", "sub",
        ["v = x.var(-1, keepdim=True, correction=0)"],
    ),
    "a variance of all": (
        "return torch.mean(x.pow(2)) - torch.mean(x).square()", "sub", ["return x.var(correction=0)"],
    ),
    "a slope of a sigmoid": (
        "return x * torch.exp(-x) / (torch.exp(-x) + 1) ** 2", "div",
        ["return x * torch.exp(-x - (2 * F.softplus(-x)))"],
    ),
    "shares of groups": (
        "i, z = torch.tensor([0, 1, 0]), torch.zeros(2)\nx = x[0]\nw = x.exp()\nreturn w / z.index_add(0, i, w)[i]",
        "exp",
        ['w = (x - z.scatter_reduce(0, i, x, "amax", include_self=False).gather(0, i).clamp(min=0).detach()).exp()'],
    ),
    "shares of groups of rows": (
        "i, z = torch.tensor([0, 1, 0]), torch.zeros(2, 3)\nw = x.exp()\nreturn w / z.index_add(0, i, w)[i]",
        "exp",
        ['w = (x - z.index_reduce(0, i, x, "amax", include_self=False).index_select(0, i)'
         ".clamp(min=0).detach()).exp()"],
    ),
    "shares of groups in place": (
        "i, x = torch.tensor([0, 1, 0]), x[0]\nt = torch.zeros(2)\nw = x.exp()\nreturn w / t.scatter_add_(0, i, w)[i]",
        "exp",
        ['w = (x - t.scatter_reduce(0, i, x, "amax", include_self=False).gather(0, i).clamp(min=0).detach()).exp()'],
    ),
    "a name that is bound anew": (
        "e = torch.exp(x)\nx = x.clamp(max=9)\nreturn torch.log(e.sum(1)) + x.sum(1)", "log",
        ["logits = x", "return torch.logsumexp(logits, 1) + x.sum(1)"],
    ),
    "a copy": ("y = torch.log(torch.exp(x))\ny += 1\nreturn y + x", "log", ["y = x.clone()"]),
}  # fmt: skip
LEFT = {
    "running shares": ("w = x.exp()\nreturn (w * x).cumsum(1) / w.cumsum(1)", "exp"),
    "shares of other sums": ("w = x.exp()\nreturn w / w.t().sum(-1, keepdim=True)", "exp"),
    "shares that are scaled again": (
        "w = torch.exp(x).t()\nw /= w.sum()\nw /= w.sum(dim=1, keepdim=True)\nreturn w / w.sum(dim=0)", "exp",
    ),
    "no sum along a dimension": ("w = x.exp()\nreturn w.log() + 0 * w.sum(-1, keepdim=True)", "exp"),
    "odds have another logarithm": ("p = torch.distributions.Bernoulli(logits=x)\nreturn torch.log(p.probs)", "log"),
    "a power of what may be negative": ("return torch.log(((x.exp() - 1) ** 2).mean(1))", "log"),
    "a mean of what may be negative": ("return torch.log((x.exp() - 1).mean(1))", "log"),
    "dimensions by a star": ("d = (1,)\nreturn torch.log(x.exp().sum(*d))", "log"),
    "whole numbers": ("w = torch.tensor([1, 2, 3])\nreturn torch.log((x.exp() * w.float()).sum(-1))", "log"),
    "an exponent of another time": ("k = 2\nq = (x.exp() ** k).sum(1)\nk = 3 - 1\nreturn torch.log(q) * k", "log"),
    "a mean before the values change": (
        "s = x.pow(2).mean(1)\nm = x.mean(1)\nif m.max() > 99:\n    x = x / 10\nreturn s - m ** 2 + x.sum(1)", "sub",
    ),
    "a square of nothing": ("square = lambda: x.mean()\nreturn (x * x).mean() - square()", "sub"),
    "a mean of others": ("return x.square().mean(-1) - (2 * x).mean(-1) ** 2", "sub"),
    "a mean along another dimension": ("return x.square().mean(-1) - x.mean(0) ** 2", "sub"),
    "dropout keeps 0, in training alone": ("p = F.dropout(x.exp(), 0.5, False)\nreturn torch.log(p.sum(-1))", "log"),
    "a summand may be negative": ("return torch.log(torch.exp(x) + x.abs()).sum(-1)", "log"),
    "a factor may be negative": ("return torch.log((x * x.abs()).prod(-1))", "log"),
    "a square of another function": ("a = torch.sin(x)\nreturn torch.log(1 - a * a)", "log"),
    "a weight may be negative": ("return torch.log((torch.exp(x) * x.abs()).sum(-1))", "log"),
    "numbers that are 0 and 1 here": (
        "reward = (x > 0).int()\nreturn torch.log((x.exp() * reward.float()).sum(-1))", "log",
    ),
    "a comprehension has names of its own": (
        "p = torch.exp(x)\nreturn torch.stack([torch.log(p.sum(-1)) for p in (p, p + 0)]).sum(0)", "log",
    ),
    "a factor of two": ("w = x.exp()\nreturn w * w / w.sum()", "exp"),
    "a sum that another branch reads": (
        "w = x.exp()\ns = w.sum(-1, keepdim=True)\nif not self.training:\n    return -s.log()\nreturn w / s", "exp",
    ),
    "powers that another branch keeps": (
        "w = x.exp()\ns = w / w.sum(-1, keepdim=True)\nself.w = None if self.training else w\nreturn s", "exp",
    ),
    "a dimension that has another value there": (
        "d = -1\np = torch.cat([x.exp(), x.exp() * 2], dim=d)\nd = 0\nreturn torch.log(p).sum(d)", "log",
    ),
}  # fmt: skip

REFUTED = {
    "the 1 would have to be scaled as well": ("w = x.exp()\nreturn w / (1 + w.sum(-1, keepdim=True))", "exp"),
    "the score is written over": (
        "s = x * 1\np = torch.exp(s)\ntorch.clamp_(s, -1, 1)\nreturn torch.log(p.sum(-1)) + s.sum(-1)", "log",
    ),
    "and through a view": (
        "s = x * 1\np = torch.exp(s[:, :2])\ns.view(-1).clamp_(-1, 1)\nreturn torch.log(p.sum(-1)) + s.sum(-1)", "log",
    ),
}  # fmt: skip


def write(code, op, folder):
    """The step of this code, and what is written for the first op of this name: the first text that means the same."""
    step = step_of(code, folder, torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
    ops = step.run(watch=CLOSELY).trace.ops
    made = next(item for item in ops if item.op == op)
    kind = StableVariance if op == "sub" else StableLog
    edits = subtractions(made, ops) if op == "exp" else [kind(site=site_of(made))]
    texts = [text for edit in edits for text in ChangeWriter(step.model, None, ops).write(edit)]
    return step, next((text for text in texts if means_the_same(step, text)), next(iter(texts), None))


def means_the_same(step, written):
    return torch.allclose(step.run(changes=(written.change,)).output, step.run().output)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_stable_form_means_the_same(name, tmp_path):
    code, op, expected = WRITTEN[name]
    step, written = write(code, op, tmp_path)
    assert [line[1:].strip() for line in written.text.splitlines()[2:] if line.startswith("+")] == expected
    torch.testing.assert_close(step.run(changes=(written.change,)).output, step.run().output)


@pytest.mark.parametrize("name", LEFT)
def test_what_may_mean_another_thing_is_left(name, tmp_path):
    _, written = write(*LEFT[name], tmp_path)
    assert written is None


@pytest.mark.parametrize("name", REFUTED)
def test_the_run_shows_what_means_another_thing(name, tmp_path):
    step, written = write(*REFUTED[name], tmp_path)
    assert not means_the_same(step, written)


@pytest.mark.parametrize(
    ("text", "value"),
    [("-2 ** -24", -(2**-24)), ("math.sqrt(2 * math.pi)", math.sqrt(2 * math.pi)), ('float("-inf")', -math.inf)]
    + [
        (text, None)
        for text in ("x + 1", "2 * self.pi", "10 ** 10 ** 10", "(-1) ** 0.5", "1 / 0", "math.log(-1)", "+x")
    ],
)
def test_a_number_is_one_of_numbers_alone(text, value):
    assert number_in(ast.parse(text, mode="eval").body) == value


FUNCTION = """
def forward(x, sharp):
    p = x.exp()
    total = p.sum()
    if sharp:
        q = p
    else:
        q = p * 2
    for step in range(3):
        first = p + total
        total = first.log()
    p = p + 1
    later = lambda: p
    r = p
    lines = [r for r in (q, r)]
    relu(first, inplace=True)
    return (p, q, total, x, first)
"""


@pytest.mark.parametrize(
    ("name", "line", "value"),
    [
        ("p", 4, "x.exp()"),
        ("p", 10, "x.exp()"),
        ("total", 10, None),  # the loop binds it as well
        ("first", 11, "p + total"),
        ("p", 13, None),  # in a function that is called later
        ("r", 15, None),  # of a comprehension
        ("first", 17, None),  # written into
        ("p", 17, "p + 1"),
        ("q", 17, None),  # by a branch
        ("x", 17, None),  # a parameter
    ],
)
def test_what_a_name_stands_for(name, line, value):
    tree = parse_source(FUNCTION)
    names = (node for node in ast.walk(tree.module) if isinstance(node, ast.Name) and node.id == name)
    read = max((node for node in names if node.lineno == line), key=tree.span)
    found = Definitions(Editor(tree, Path("net.py"), None), read).assignment_of(read)
    assert (None if found is None else tree.code(found.value)) == value


def test_an_eps_still_makes_zeros_of_a_row_of_minus_infinities(tmp_path):
    step, written = write("w = x.exp()\nreturn w / (w.sum(-1, keepdim=True) + 1e-8)", "exp", tmp_path)
    for values in (torch.full((2, 4), -torch.inf), torch.full((2, 4), -30.0), torch.full((2, 4), 5.0)):
        there = dataclasses.replace(step, call=dataclasses.replace(step.call, batch={"x": values}))
        torch.testing.assert_close(there.run(changes=(written.change,)).output, there.run().output)
