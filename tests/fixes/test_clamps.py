"""Clamps that hold on the failing batch, and what the verification asks of them beyond it."""

import runpy

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor.autocast.policy import REFERENCE
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.guard import GuardArgument
from nandoctor.changes.places import site_of
from nandoctor.engine.runner import CLOSELY, FailingStep
from nandoctor.evidence.edits import Together
from nandoctor.fixes.writing import ChangeWriter

FILE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        BODY

    def powers(self, x):
        return torch.exp(self.lift(x))
"""
SOFTMAX = "w = self.powers(x); return w / w.sum(-1, keepdim=True)"
ATTENTION = "w = self.powers(x) * (x != 7); return (w / (w.sum(1, keepdim=True) + 1e-6)) @ x.t() / 100"
GATE = "top, index = self.powers(x).topk(2); return top[:, 0] / top.sum(-1)"
HALF = "s = self.lift(x).float(); return torch.log(s) * 0 + torch.sqrt(15 - s)"
ENTROPY = "p = torch.sigmoid(self.lift(x)).mul(1); return -(p * torch.log(p) + (1 - p) * torch.log(1 - p))"
DEGREES = "inverse = (x.abs() @ x.abs().t()).float().sum(1).pow(-0.5); return inverse[:, None] * self.lift(x)"


def fixes(body, x, folder):
    (folder / "net.py").write_text(FILE.replace("BODY", body.replace("; ", "\n        ")))
    torch.save({"state_dict": {"lift.weight": torch.eye(4)}, "x": torch.tensor(x)}, folder / "dump.pth")
    return nandoctor.replay(folder / "dump.pth", f"{folder / 'net.py'}:Net", max_trials=60).report.fixes


def failed(fix):
    return [check.name for check in fix.checks if check.status == "failed"]


@pytest.mark.parametrize(
    ("body", "top"),
    [
        pytest.param(SOFTMAX, 100.0, id="softmax"),
        *(pytest.param(body, 100.0, marks=pytest.mark.slow) for body in (ATTENTION, GATE)),
        pytest.param(ATTENTION, 900.0, marks=pytest.mark.slow),
    ],
)
def test_a_clamp_by_which_scores_would_tie_is_refused(body, top, tmp_path):
    rows = [[0.1, -0.2, 0.3, 0.5], [0.0, 0.0, top, 0.0], [0.5, 1.0, -1.0, 0.2]]
    clamps = [fix for fix in fixes(body, rows, tmp_path) if fix.kind == "source" and "clamp(max=" in fix.patch]
    assert top == 900.0 or len(clamps) == 1  # past float64's range none may be left to show
    for clamp in clamps:
        assert (clamp.outcome.finite, failed(clamp)) == (True, ["exponents past the bound"])


def test_a_power_of_zero_is_left_out_before_it_is_bounded(tmp_path):
    tried = fixes(DEGREES, [[1.0, 2.0, 0.5, 0.1], [0.0] * 4], tmp_path)
    first, *others = (fix for fix in tried if fix.kind == "source")
    assert first.verified
    assert "guarded <= 0" in first.patch
    assert not any("clamp" in fix.patch for fix in others)


def test_every_logarithm_of_a_statement_is_clamped(tmp_path):
    first, *_ = fixes(ENTROPY, [[0.1, 0.2, 0.3, 40.0], [0.5, 1.0, -1.0, 0.2]], tmp_path)
    assert first.verified
    assert first.patch.count("clamp") == 2
    assert first.title.endswith("of net.py (2 places)")


def test_each_argument_gets_the_bound_of_its_own_edit(tmp_path):
    (tmp_path / "logs.py").write_text("import torch\n\n\ndef take(p, q):\n    return torch.log(p) - torch.log(q)\n")
    take = runpy.run_path(str(tmp_path / "logs.py"))["take"]
    model = nn.Identity()
    step = FailingStep(
        model=model,
        batch={},
        used=frozenset(),
        forward=lambda _: take(model(torch.zeros(2)), torch.zeros(2)),
        device=torch.device("cpu"),
        description="",
        policy=REFERENCE,
    )
    ops = step.run(watch=CLOSELY).trace.ops
    logs = [site_of(op) for op in ops if op.op == "log"]
    edits = [ClampArgument(site=site, argument="self", low=low) for site, low in zip(logs, (0.5, 0.25), strict=True)]
    change = next(ChangeWriter(model, None, ops).write(Together(edits=tuple(edits))))
    assert "torch.log(p.clamp(min=0.5)) - torch.log(q.clamp(min=0.25))" in change.text
    assert "places" not in change.title
    assert change.title.count(";") == 1


@pytest.mark.slow
def test_what_fp32_does_not_do_either_is_let_pass(tmp_path):
    """Doubled inputs take the root below 0, in fp32 as well."""
    found = fixes(HALF, [[10.0, 1e-9, 0.2, 10.0], [0.5, 1.0, 1.0, 0.2]], tmp_path)
    clamp = next(fix for fix in found if fix.kind == "source" and "clamp" in fix.patch)
    (doubled,) = (check for check in clamp.checks if check.name == "inputs doubled")
    assert (doubled.status, doubled.text) == ("passed", "finite wherever fp32 is")


def test_nothing_is_selected_after_what_an_op_writes_elsewhere(tmp_path):
    body = (
        "h = self.lift(x); kept = torch.empty_like(h); torch.div(1 + h.detach(), x, out=kept); return h + kept.sqrt()"
    )
    found = [fix for fix in fixes(body, [[0.5, 0.0, 1.0, 2.0]], tmp_path) if isinstance(fix.edit, GuardArgument)]
    assert not any(fix.verified for fix in found)


DECAY = (
    "i = torch.arange(40.0); d = 0.05 ** (i[:, None] - i); return (d * torch.ones(40, 40).tril()).sum() + self.lift(x)"
)
BETA = "y = self.lift(x).sigmoid().float(); return torch.distributions.Beta(y + 1, y + 2).log_prob(x.clamp(0, 1)) + y"
BOTH = (
    "p = torch.sigmoid(self.lift(x).float()); f = lambda p: torch.log(p) * p + torch.log(1 - p) * (1 - p); return f(p)"
)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (DECAY, "0.05 ** (i[:, None] - i).clamp(min=0)"),
        pytest.param(BETA, "log_prob(x.clamp(0, 1).clamp(min=1e-6, max=0.999999))", marks=pytest.mark.slow),
        pytest.param(BOTH, "torch.log(p.clamp(min=1e-12)) * p + torch.log((1 - p).clamp(", marks=pytest.mark.slow),
    ],
    ids=[
        "the half of a table that is left out",
        "a density of x and 1 - x",
        "both logarithms of a lambda",
    ],
)
def test_the_clamp_that_an_expert_writes(body, text, tmp_path):
    assert text in fixes(body, [[0.2, 1.0, 0.0, 40.0], [0.5, 0.3, 0.1, 0.2]], tmp_path)[0].patch
