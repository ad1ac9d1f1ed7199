"""A verified fix means what the formula means; what makes the step finite otherwise is a workaround, or nothing."""

import pytest
import torch

import nandoctor
from nandoctor.fixes.agreement import Result
from nandoctor.fixes.meaning import reversed_gradient

FILE = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 4)

    def forward(self, x, s):
        h = self.lift(x)
        FORWARD


def loss(output, batch):
    h, s = output.float(), batch["s"]
    LOSS
"""
ERROR = "return (h - 0.3).square().mean()"
SIZES = torch.tensor([[0.5, 1.5, 0.2, 3.0], [0.7, 0.1, 0.4, 2.0], [0.3, 0.6, 0.9, 1.2]])
ZERO, LARGE = SIZES * torch.tensor([[1.0], [0.0], [1.0]]), SIZES + torch.tensor([[0.0], [120.0], [0.0]])


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


def replay(forward, loss, s, folder):
    torch.manual_seed(0)
    (folder / "net.py").write_text(FILE.replace("FORWARD", forward).replace("LOSS", loss))
    layer = torch.nn.Linear(4, 4)
    batch = {"x": torch.randn(3, 4), "s": s, "autocast": False}
    torch.save({"state_dict": {"lift.weight": layer.weight, "lift.bias": layer.bias}, **batch}, folder / "dump.pth")
    return nandoctor.replay(folder / "dump.pth", f"{folder}/net.py:Net", loss=f"{folder}/net.py:loss").report


def of_code(report):
    return [fix for fix in report.fixes if fix.kind == "source"]


@pytest.mark.parametrize(
    ("forward", "loss"),
    [
        ("return h * (torch.clamp(s, max=0.4) / s)", ERROR),
        slow("return h * (torch.sin(s) / s)", ERROR),
        slow("return h + (torch.exp(s) - 1) / s", ERROR),
        slow("return h", "return (torch.clamp(s, max=0.4) / s * (h - 1).square()).mean()"),
    ],
)
def test_a_ratio_of_zeros_gets_its_limit(forward, loss, tmp_path):
    (fix, *_) = of_code(replay(forward, loss, ZERO, tmp_path))
    assert fix.verified
    assert (fix.edit.kind, fix.edit.fill) == ("guard", 1.0)


@pytest.mark.parametrize(
    "forward",
    [
        "return h * (torch.clamp(2 * s, max=0.4) / s)",
        slow("return h * (torch.sin(3 * s) / s)"),
        slow("return h + (torch.exp(0.5 * s) - 1) / s"),
    ],
)
def test_a_value_beside_the_limit_is_a_workaround(forward, tmp_path):
    report = replay(forward, ERROR, ZERO, tmp_path)
    assert not [fix.title for fix in of_code(report) if fix.verified]
    (fix, *_) = of_code(report)
    assert "the formula tends to" in fix.workaround
    assert [check.name for check in fix.checks if check.status == "failed"] == ["limit"]
    assert fix.workaround in report.search_notes[-1] or any(other.verified for other in report.fixes)


@pytest.mark.parametrize(
    ("loss", "s"),
    [
        ("return (torch.exp(h + s) - (h + s) - 1).mean()", LARGE),
        slow("rate = h + s; return (rate.exp() - 3 * rate).mean()", LARGE),
        slow("return (torch.exp(h + s) - (h + s) + h.square()).sum()", LARGE),
    ],
)
def test_a_clamp_that_turns_a_gradient_round_is_not_verified(loss, s, tmp_path):
    report = replay("return h", loss, s, tmp_path)
    assert not [fix.title for fix in of_code(report) if fix.verified]


@pytest.mark.parametrize(
    ("forward", "amount", "terms"),
    [
        ("return h + torch.log(s - 4.0)", "3.9", "minus 4"),
        slow("return h + torch.sqrt(s.mean(-1, keepdim=True) - 9.0)", "8.25", "minus 9"),
        slow("return h * torch.acos(s)", "2", ""),
    ],
)
def test_an_argument_far_outside_its_domain_is_an_error(forward, amount, terms, tmp_path):
    report = replay(forward, ERROR, SIZES, tmp_path)
    assert of_code(report) == []
    (note, *_) = report.search_notes
    assert note.startswith("The program is wrong here")
    assert f"{amount} in float64 too" in note
    assert terms in note


@pytest.mark.parametrize(
    "forward",
    [
        "return F.layer_norm(h + (1 / s).mean(-1, keepdim=True), (4,))",
    ],
)
def test_what_an_eps_makes_up_is_compared_with_the_limit(forward, tmp_path):
    report = replay(forward, ERROR, ZERO, tmp_path)
    (first, *_) = [fix for fix in of_code(report) if fix.verified]
    assert "value 0" in first.title


def test_no_large_number_is_verified_where_there_is_no_limit(tmp_path):
    report = replay("return h + 1 / (1 / torch.log(s))", ERROR, ZERO, tmp_path)
    assert not [fix.title for fix in of_code(report) if fix.verified and "1e-12" in fix.title]


def test_rounding_that_leaves_a_domain_is_no_error(tmp_path):
    report = replay(
        "return h * torch.acos((s / s.norm(dim=-1, keepdim=True)).square().sum(-1))[:, None]", ERROR, SIZES, tmp_path
    )
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
