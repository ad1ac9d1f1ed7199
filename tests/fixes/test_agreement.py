"""How far two runs are from each other; what a search calls verified is FIXED once it is written."""

from pathlib import Path

import pytest
import torch

import nandoctor
from nandoctor import cuda_autocast
from nandoctor.case import check
from nandoctor.fixes.agreement import Result, compare_runs, gradient_error

MASKED = """
scores = self.q(x) @ x.mT
scores = scores + (1.0 - mask[:, None, :].to(scores.dtype)) * -1e9
return scores.softmax(-1) @ self.v(x)
"""


def test_a_verified_fix_is_fixed_once_it_is_written(project):
    """Of the third sample everything is masked: its output depends on the value of the mask, which the fix changes."""
    project.write(MASKED, inputs="x, mask", layers="self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)")
    x, mask = torch.randn(4, 5, 8), torch.ones(4, 5)
    mask[1, 3:], mask[2] = 0, 0
    model = project.build()
    with cuda_autocast():
        project.save(model.state_dict(), x=x, mask=mask, output=model(x, mask).detach())
    report = project.replay(max_trials=60)
    fix = next(fix for fix in report.fixes if fix.verified)
    assert fix.kind == "source"
    project.apply(fix)
    runs = {"mode": "train" if report.runs.autocast.training else "eval", "seed": report.runs.autocast.seed}
    dump, told = nandoctor.load("dump.pth"), [Path("net.py")]
    made, _ = check(dump, model=project.model, changed=told, proved=True, **runs)
    assert made.outcome == "fixed", (fix.title, made.headline)


def test_gradients_of_complex_weights_are_compared():
    made, reference = (
        Result(values={}, gradients={"filter": torch.tensor([3 + imaginary * 1j, 0])}, ran=True) for imaginary in (5, 4)
    )
    assert reference.gradient_norm == 5
    assert gradient_error(made, reference) == 0.2
    assert gradient_error(reference, reference) == 0


def test_an_accepted_error_of_a_small_sample():
    made, reference = (
        Result(values={"output": torch.tensor(values)}, gradients={}, ran=True)
        for values in ([[1.0], [0.006]], [[1.0], [0.004]])
    )
    found = compare_runs(made, reference)
    assert found.max_rel_err == pytest.approx(0.5)
    assert found.accepted_rel_err(0.01) == pytest.approx(0.002)
    assert found.accepted_rel_err(0.6) == pytest.approx(0.5)
