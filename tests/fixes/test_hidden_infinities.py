"""An Inf that decides a choice is mended where it was made; `test_printed_fixes.py` has those that spoil a gradient."""

import pytest
import torch

import nandoctor

FORWARD = """
scores = self.score(x)
rest = REST
best = (scores * scores).argmax(-1)
return self.mix(x[best] * 1e-3) + rest
"""


def replay_choice(project, *, rest="0.0", scale="1.0"):
    """Two scores of the first row overflow, and the one that is chosen for coming first is the larger indeed."""
    layers = "self.score, self.mix = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)"
    loss = f"return output.float().square().mean() * {scale}"
    project.write(FORWARD.replace("REST", rest), layers=layers, loss=loss)
    state = {"score.weight": torch.eye(4), "mix.weight": torch.eye(4), "mix.bias": torch.zeros(4)}
    x = torch.tensor([[400.0, 300.0, 1.0, 2.0], [1.0, 2.0, 3.0, 5.0], [3.0, 1.0, 0.5, 0.1], [0.1, 0.2, 0.3, 0.4]])
    project.save(state, x=x)
    return project.replay()


def test_a_choice_is_mended_along_with_the_gradients(project):
    report = replay_choice(project, scale="1e6")
    assert (report.verdict, report.cause.code) == ("silent", "elementwise-overflow")
    assert "scores * scores" in report.headline
    assert report.bad_gradients
    assert "gradient-overflow" in [diagnosis.cause.code for diagnosis in report.also]
    assert report.fixes[0].verified
    project.apply(report.fixes[0])
    assert nandoctor.verify("dump.pth", project.model, loss=project.loss).outcome == "passes"


@pytest.mark.slow
def test_a_change_that_leaves_the_choice_is_not_verified(project):
    """Without the NaN, the output is that of fp32, and still chosen by an Inf."""
    report = replay_choice(project, rest="(scores * scores * scores).sum() * 0")
    assert report.cause.code == "elementwise-overflow"
    for fix in report.fixes:
        chooses_in_fp32 = "best" in fix.patch or "self.score(" in fix.patch
        assert chooses_in_fp32 or not fix.verified, fix.title
    failed = [check for fix in report.fixes for check in fix.checks if check.status == "failed"]
    assert any(check.name == "hidden values" and "argmax (net.py:" in check.text for check in failed)
