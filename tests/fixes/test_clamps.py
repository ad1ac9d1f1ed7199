"""Clamps that hold on the failing batch, and what the verification asks of them beyond it."""

import runpy

import pytest
import torch
from made_traces import make_step
from projects import EYE, failures
from torch import nn

from nandoctor.autocast.policy import REFERENCE
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.guard import GuardArgument
from nandoctor.changes.places import site_of
from nandoctor.engine.runner import CLOSELY
from nandoctor.evidence.edits import Together
from nandoctor.fixes.writing import ChangeWriter

SOFTMAX = "w = POWERS; return w / w.sum(-1, keepdim=True)"
ATTENTION = "w = POWERS * (x != 7); return (w / (w.sum(1, keepdim=True) + 1e-6)) @ x.t() / 100"
HALF = "s = self.lift(x).float(); return torch.log(s) * 0 + torch.sqrt(15 - s)"
DEGREES = "inverse = (x.abs() @ x.abs().t()).float().sum(1).pow(-0.5); return inverse[:, None] * self.lift(x)"


def fixes(body, x, project):
    project.write(body.replace("; ", "\n").replace("POWERS", "torch.exp(self.lift(x))"), layers=EYE)
    project.save(x=torch.tensor(x))
    return project.replay(max_trials=100).fixes


@pytest.mark.slow
@pytest.mark.parametrize(("body", "top"), [(SOFTMAX, 100.0), (ATTENTION, 100.0), (ATTENTION, 900.0)])
def test_a_clamp_by_which_scores_would_tie_is_refused(body, top, project):
    rows = [[0.1, -0.2, 0.3, 0.5], [0.0, 0.0, top, 0.0], [0.5, 1.0, -1.0, 0.2]]
    clamps = [fix for fix in fixes(body, rows, project) if fix.kind == "source" and "clamp(max=" in fix.patch]
    assert top == 900.0 or len(clamps) == 1  # past float64's range none may be left to show
    for clamp in clamps:
        assert (clamp.outcome.finite, failures(clamp)) == (True, ["exponents past the bound"])


def test_a_power_of_zero_is_left_out_before_it_is_bounded(project):
    tried = fixes(DEGREES, [[1.0, 2.0, 0.5, 0.1], [0.0] * 4], project)
    first, *others = (fix for fix in tried if fix.kind == "source")
    assert first.verified
    assert "guarded <= 0" in first.patch
    assert not any("clamp" in fix.patch for fix in others)


def test_each_argument_gets_the_bound_of_its_own_edit(tmp_path):
    (tmp_path / "logs.py").write_text("import torch\n\n\ndef take(p, q):\n    return torch.log(p) - torch.log(q)\n")
    take = runpy.run_path(str(tmp_path / "logs.py"))["take"]
    model = nn.Identity()
    forward = {"forward": lambda _: take(model(torch.zeros(2)), torch.zeros(2))}
    ops = make_step(model, {}, REFERENCE, **forward).run(watch=CLOSELY).trace.ops
    logs = [site_of(op) for op in ops if op.op == "log"]
    edits = [ClampArgument(site=site, argument="self", low=low) for site, low in zip(logs, (0.5, 0.25), strict=True)]
    change = next(ChangeWriter(model, None, ops).write(Together(edits=tuple(edits))))
    assert "torch.log(p.clamp(min=0.5)) - torch.log(q.clamp(min=0.25))" in change.text
    assert "places" not in change.title
    assert change.title.count(";") == 1


@pytest.mark.slow
def test_what_fp32_does_not_do_either_is_let_pass(project):
    """Doubled inputs take the root below 0, in fp32 as well."""
    found = fixes(HALF, [[10.0, 1e-9, 0.2, 10.0], [0.5, 1.0, 1.0, 0.2]], project)
    clamp = next(fix for fix in found if fix.kind == "source" and "clamp" in fix.patch)
    (doubled,) = (check for check in clamp.checks if check.name == "inputs doubled")
    assert (doubled.status, doubled.text) == ("passed", "finite wherever fp32 is")


def test_nothing_is_selected_after_what_an_op_writes_elsewhere(project):
    body = (
        "h = self.lift(x); kept = torch.empty_like(h); torch.div(1 + h.detach(), x, out=kept); return h + kept.sqrt()"
    )
    found = [fix for fix in fixes(body, [[0.5, 0.0, 1.0, 2.0]], project) if isinstance(fix.edit, GuardArgument)]
    assert not any(fix.verified for fix in found)
