"""Prescriptions on networks unlike the corpus; of the changes that hold the least one, and what it costs."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nandoctor.changes.setting import UseFormat
from nandoctor.engine.progress import Listener
from nandoctor.evidence.edits import flatten
from nandoctor.evidence.formats import BF16, FP32, FP64
from nandoctor.evidence.report import StepSetting
from nandoctor.fixes.verify import BudgetSpent


def test_a_module_that_is_called_several_times(replay_step):
    """Only the last call overflows."""
    layers = "self.grow, self.head = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)"
    layers += "\nself.grow.weight.data = torch.eye(4) * 60.0"
    forward = "return self.head(self.grow(self.grow(self.grow(x))))"
    report = replay_step(forward, {"x": torch.rand(2, 4) + 1}, layers=layers)
    assert report.fixes[0].verified
    assert report.fixes[0].title == "Keep grow in fp32"
    assert not any(isinstance(fix.edit, UseFormat) for fix in report.fixes)  # where nothing smaller holds
    assert any(line.setting.dtype is BF16 and line.outcome.finite for line in report.counterfactuals)


def test_where_the_program_is_wrong_nothing_is_prescribed(replay_step):
    report = replay_step("return torch.acos(x)", {"x": torch.tensor([[0.5, 1.5]])})
    assert (report.verdict, report.fixes) == ("numerics", ())
    assert "outside the domain of `torch.acos(x)` by 0.5 in float64 too" in report.search_notes[0]
    assert report.fp32_sets is None
    assert any("casts to fp32 fix nothing" in note for note in report.search_notes)
    settings = {line.setting: line.outcome.finite for line in report.counterfactuals}
    assert settings[StepSetting(dtype=FP64)] is False


def test_where_nothing_can_be_tried_the_reason_is_told(replay_step):
    report = replay_step("return torch.linalg.inv_ex(x * 0).inverse", {"x": torch.eye(2)})
    assert report.fixes == ()
    assert "known that keeps its meaning (" in report.search_notes[-1]


@pytest.mark.usefixtures("every_variation")
def test_variations_tell_the_guilty_sample_and_the_mode(replay_step):
    layers = "self.lift, self.drop, self.calm = nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4)"
    layers += "\nself.lift.weight.data = torch.eye(4) * 0.9"
    x = torch.randn(3, 4)
    x[1] = 6e4
    report = replay_step("return self.calm(self.drop(self.lift(x)))", {"x": x}, layers=layers, mode="train")
    lines = {line.setting: line.outcome for line in report.counterfactuals}
    assert not lines[StepSetting(training=True)].finite
    assert lines[StepSetting(training=False)].finite  # 1 / (1 - p) is what passes the limit
    assert not lines[StepSetting(only=(1,))].finite
    assert lines[StepSetting(without=(1,))].finite
    assert lines[StepSetting(dtype=FP32)].max_rel_err == 0


class Detector(nn.Linear):
    """In eval mode its output is one that the loss of the training does not take, as that of a detector."""

    def forward(self, x):
        found = super().forward(x)
        return {"box": found.square().sqrt().mean()} if self.training else [found]


def total(output, _):
    return sum(output.values())


@pytest.mark.usefixtures("every_variation")
def test_a_loss_that_another_mode_does_not_suit(replay):
    model = Detector(4, 2, bias=False)
    arrays = {"x": torch.zeros(3, 4), "output": model(torch.zeros(3, 4))}
    report = replay(model, arrays, loss=total)
    assert (report.origin.phase, report.origin.op) == ("backward", "sqrt")
    assert report.fixes[0].verified
    tried = [line.setting.training for line in report.counterfactuals if line.group == "mode"]
    assert tried == [True]


@pytest.mark.slow
def test_an_output_within_the_formats_rounding_agrees(replay_step):
    """Probabilities that are zero in fp16, and right by that."""
    layers = "self.logits = nn.Linear(4, 4)\nself.logits.weight.data.zero_(), self.logits.bias.data.fill_(-30.0)"
    dice = "return 1 - (output * output).mean() / ((output * output).mean() + 1e-8)"
    report = replay_step("return torch.sigmoid(self.logits(x))", {"x": torch.randn(2, 4)}, layers=layers, loss=dice)
    assert report.cause.code == "eps-underflow"
    assert report.fixes[0].verified


def test_no_two_fixes_are_one_text(replay_step):
    """A temperature that fp16 rounds to 0, where the op and its expression in fp32 are one text."""
    layers = "self.lift, self.temperature = nn.Linear(8, 8), nn.Parameter(torch.tensor(1e-8))"
    forward = "scaled = lambda rows: self.lift(rows) / self.temperature\nreturn scaled(x) * 1e-9"
    report = replay_step(forward, {"x": torch.ones(3, 8)}, layers=layers)
    patches = [fix.patch for fix in report.fixes if fix.patch]
    assert report.fixes[0].verified
    assert len(patches) == len(set(patches)) > 1


GATED = """
gate = torch.sigmoid(self.gate(x * 1e5))
h = self.lift(x) * 600
squares = h * h
return gate * squares / squares.amax(-1, keepdim=True)
"""


def test_an_overflow_that_is_meant_rules_no_change_out(replay_step):
    """One in the forward, and by intent one in the product of a gate that is not trained."""
    layers = "self.lift, self.gate = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False).requires_grad_(False)"
    layers += "\nnn.init.constant_(self.gate.weight, 1.0)"
    report = replay_step(GATED, {"x": torch.linspace(1, 2, 32).reshape(4, 8)}, layers=layers)
    assert report.fixes[0].verified, report.fixes
    assert report.fixes[0].title.startswith("Compute mul in line")
    assert [[member.module for member in found.modules] for found in report.fp32_sets.sets] == [[""], ["lift"]]


@pytest.mark.parametrize(("size", "verified"), [(2e5, True), (1e30, False)])
def test_a_weight_that_fp16_cannot_hold(size, verified, replay):
    """In fp32 the module computes with it; one that no training makes is not kept so."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[1] = size
    report = replay(model, {"x": torch.rand(3, 4) + 1})
    assert (report.verdict, report.cause.code) == ("state", "poisoned-weights")
    assert [fix.verified for fix in report.fixes] == [True] * verified
    assert not verified or report.fixes[0].title == "Keep 0 in fp32"


class Scores(nn.Module):
    """A product in its own forward, beside a module: [n, 4, 4] -> same."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(torch.softmax(x @ x.transpose(1, 2), -1))


def test_a_module_is_kept_whole_where_no_line_can_be_written(replay):
    """No line of code calls the layer before it, so that no diff can hold both."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Scores())
    model[0].weight.data = torch.eye(4) * 3e4
    report = replay(model, {"x": torch.rand(2, 4, 4) + 3})
    assert (report.fixes[0].verified, report.fixes[0].title) == (True, "Keep 2 modules in fp32: 0, 1")


class Twice(nn.Module):
    """A layer overflows in one call, and by a product after another; in fp32 it is enough for both: [n, 4] -> same."""

    def __init__(self):
        super().__init__()
        self.lift, self.calm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)
        self.lift.weight.data = torch.eye(4) * 3e4

    def raise_(self, x):
        return self.lift(x)

    def forward(self, x):
        half, whole = self.raise_(x * 0.4), self.raise_(x)
        return self.calm(half * 3) + self.calm(whole)


def test_a_change_that_holds_alone_is_shown_alone(replay):
    x = torch.tensor([[3.0, 1.0, 0.5, 0.2], [1.0, 2.0, 0.1, 0.3]])
    report = replay(Twice, {"x": x})
    sets = [set(flatten((fix.edit,))) for fix in report.fixes if fix.verified]
    assert sets
    assert not any(one < other for one in sets for other in sets)


def test_code_that_is_in_no_file_gets_no_diff(replay):
    space = {"nn": torch.nn}
    code = "class Cell(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) / x.norm()\n"
    exec(compile(code, "<cell>", "exec"), space | {"__name__": "__main__"}, space)
    report = replay(lambda: space["Cell"](2, 2), {"x": torch.zeros(3, 2)})
    assert not any(fix.kind == "source" for fix in report.fixes)


MEL = {
    "layers": 'self.register_buffer("bank", torch.ones(3, 5))\nself.head = nn.Linear(3, 2)',
    "inputs": "power",
    "forward": "mel = torch.matmul(power, self.bank.T)\nreturn self.head(torch.log10(mel.clamp(min=1e-10)))",
}


@pytest.fixture
def mel(project):
    """A step with two ways to fail: an eps that fp16 rounds to 0, and a product past its range."""
    project.write(**MEL)
    project.save(power=torch.rand(4, 5) * torch.tensor([[1.0], [1e5], [0.0], [1.0]]))
    return project


def test_what_another_part_mends_is_left_out(mel):
    """The eps is none where the product before it is in fp32."""
    verified = [fix for fix in mel.replay().fixes if fix.verified]
    assert "torch.matmul(power.float(), self.bank.T.float())" in verified[0].patch
    assert not any("clamp(min=1e-10).clamp" in fix.patch for fix in verified)


def test_a_fix_is_kept_if_the_budget_ends_on_a_smaller_one(mel, monkeypatch):
    def end_budget(*_):
        raise BudgetSpent

    monkeypatch.setattr("nandoctor.fixes.search._Search._without_idle_parts", end_budget)
    assert [fix.verified for fix in mel.replay().fixes] == [True]


class Shares(nn.Module):
    """Sums of all overflow in fp16 and fp32; the file does not say which of the two it was."""

    def forward(self, x):
        return (x / x.sum(-1, keepdim=True)).log()


class Stopping(Listener):
    stops_gently = True

    def __init__(self):
        super().__init__()
        self.later = []

    def begin(self, stage):
        super().begin(stage)
        if self.interrupted:
            self.later.append(stage)
        elif stage.startswith("trial"):
            raise KeyboardInterrupt


def test_nothing_is_run_after_an_interrupt(replay):
    stopping = Stopping()
    report = replay(Shares, {"x": 1e38 * (1 + torch.rand(4, 8))}, progress=stopping)
    assert (stopping.interrupted, stopping.later) == (True, [])
    assert report.search_notes[0].endswith(
        "not complete. Not or not fully tried: sets of modules in fp32, other settings."
    )


def test_nothing_is_claimed_of_float64_that_was_not_run(replay, monkeypatch):
    def logistic(self, x):
        return x.exp() / (1 + x.exp())

    model = type("Logistic", (nn.Module,), {"forward": logistic})
    assert replay(model, {"x": torch.tensor([[1.0], [100.0]])}).fixes[0].verified
    monkeypatch.setattr("nandoctor.fixes.verify.MOST_FP64_PARAMETERS", -1)
    report = replay(model, {"x": torch.tensor([[1.0], [100.0]])}, max_trials=30)
    assert {fix.verified for fix in report.fixes} == {False}
    assert "was not run in float64" in report.fixes[0].workaround


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8 * 6 * 6, 5)
        nn.init.constant_(self.head.weight, 30000.0)

    def forward(self, x):
        return self.head(self.conv(x).relu().flatten(1))


def test_the_share_of_multiply_adds_is_torchs_own(replay):
    model, x = Net(), torch.rand(2, 3, 8, 8)
    fixes = replay(model, {"x": x}, builds=Net).fixes
    (kept,) = [fix for fix in fixes if getattr(fix.edit, "module", None) == "head"]
    with FlopCounterMode(display=False) as counter:
        model(x)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    assert kept.cost.products_in_fp32 == pytest.approx(counts["Net.head"] / counts["Net"])
    assert 0 < kept.cost.more_activations < 0.1  # ten numbers beside the 576 of the convolution, and their relu
