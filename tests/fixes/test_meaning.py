"""A verified fix means what the formula means; what makes the step finite otherwise is a workaround, or nothing."""

import pytest
import torch

from nandoctor.fixes.agreement import Result, reversed_gradient

SIZES = torch.tensor([[0.5, 1.5, 0.2, 3.0], [0.7, 0.1, 0.4, 2.0], [0.3, 0.6, 0.9, 1.2]])
ZERO = SIZES * torch.tensor([[1.0], [0.0], [1.0]])


@pytest.fixture
def replay(replay_step):
    """A function (forward, s) -> report: the forward has a layer's output h of the input x, and s."""
    more = {"layers": "self.lift = nn.Linear(4, 4)", "loss": "return (output.float() - 0.3).square().mean()"}

    def replay(forward, s):
        batch = {"x": torch.randn(3, 4), "s": s, "autocast": False}
        return replay_step(f"h = self.lift(x)\n{forward}", batch, inputs="x, s", **more)

    return replay


def of_code(report):
    return [fix for fix in report.fixes if fix.kind == "source"]


def test_the_number_that_the_formula_tends_to_is_found(replay):
    fix = of_code(replay("return torch.tanh(h * ((s - torch.sin(s)) / s**3))", ZERO))[0]
    assert (fix.verified, fix.edit.fill) == (True, pytest.approx(1 / 6, rel=1e-4))


def test_a_value_beside_the_limit_is_a_workaround(replay):
    report = replay("return h + ((1 + x.abs()) ** s - 1) / s", ZERO)  # it tends to log(1 + x)
    assert not [fix.title for fix in of_code(report) if fix.verified]
    (fix, *_) = of_code(report)
    assert "the formula tends to" in fix.workaround
    assert [check.name for check in fix.checks if check.status == "failed"] == ["limit"]
    assert any(fix.workaround in note for note in report.search_notes)


def test_rounding_that_leaves_a_domain_is_no_error(replay):
    forward = "return h * torch.acos((s / s.norm(dim=-1, keepdim=True)).square().sum(-1))[:, None]"
    report = replay(forward, SIZES)
    assert not any("program is wrong" in note for note in report.search_notes)


def results(ours, theirs):
    return [Result(values={}, gradients={"w": torch.tensor(one)}, ran=True) for one in (ours, theirs)]


@pytest.mark.parametrize(
    ("ours", "theirs", "is_reversed"),
    [
        ([1.0, -1.0], [1e40, -2e40], False),
        ([0.0, 1.0], [1e30, 1.0], False),
        ([-0.1, 1.0], [1e30, 1.0], True),
        ([-1e-6, 1.0], [1e30, 1.0], False),
        ([-1.0, 1.0, 1.0], [0.1, 1.0, 1.0], False),
    ],
)
def test_a_gradient_is_reversed_where_it_counts(ours, theirs, is_reversed):
    ours, theirs = results(ours, [float(one) for one in theirs])
    assert (reversed_gradient(ours, theirs) is not None) == is_reversed
