"""What a verified fix has to stand: gradients at the loss scale, healthy samples, and batches near to its own."""

import re
from pathlib import Path

import pytest
import torch
from projects import eye, failures
from tiny_models import Eye
from torch import nn

from nandoctor.fixes.proof import CRITERIA

DOCS = Path(__file__).parents[2] / "docs"


def test_a_clamp_that_float64_contradicts_is_no_fix(replay_step):
    x = torch.tensor([[140.0, 1.0], [0.5, -2.0]])
    report = replay_step("return torch.log(torch.exp(self.lift(x)).sum(dim=-1, keepdim=True))", {"x": x}, layers=eye(2))
    assert report.verdict == "numerics"  # exp(140) overflows in fp32 as well, and its logarithm is 140
    verified = [item for item in report.fixes if item.verified]
    assert [item.edit.kind for item in verified] == ["stable-log"]
    assert "logsumexp(self.lift(x).float()" in verified[0].patch
    assert all(not item.verified for item in report.fixes if item.edit.kind == "clamp")


def test_the_docs_list_the_criteria_in_their_order():
    told = re.findall(r"^\| `([a-z0-9 ]+)` \| ", (DOCS / "fixing.md").read_text(), re.M)
    assert told == [name for name, _ in CRITERIA]


def test_what_means_another_thing_in_eval_mode_is_no_fix(replay_step):
    hidden = "s = self.lift(x) + (1 - keep) * -1e9\n"
    code = hidden + "if not self.training:\n    return (s > -5e8).float()\nreturn s.softmax(-1)"
    keep = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).half()
    batch = {"x": torch.tensor([[2.0, 3.0], [0.0, 1.0]]), "keep": keep}
    report = replay_step(code, batch, layers=eye(2), mode="train")
    constant = next(item for item in report.fixes if item.edit.kind == "set-argument")
    assert not constant.verified
    assert any(check.status == "failed" and "in eval mode" in check.text for check in constant.checks)


AMPLIFIER = "h = self.lift(x)\nreturn h / (h * h).mean(-1, keepdim=True).sqrt()"


@pytest.mark.parametrize(
    ("loss_scale", "tried"), [(1024.0, "4,096"), pytest.param(1.0, "loss scale 4,", marks=pytest.mark.slow)]
)
def test_gradients_are_checked_with_room_for_a_growing_scale(loss_scale, tried, replay_step):
    """The forward overflows in a square."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    loss = "return output[:, 0].float().mean()"
    report = replay_step(AMPLIFIER, {"x": x}, layers=eye(gain=300), loss=loss, loss_scale=loss_scale)
    checks = {check.name: check for check in report.fixes[0].checks}
    assert report.fixes[0].verified
    assert checks["loss"].status == checks["gradients"].status == "passed"
    assert tried in checks["gradients"].text


class Upstream(Eye):
    """The square overflows; fp32 in the layer before it only helps because its output stays wide."""

    width, gain = 4, 300

    def __init__(self):
        super().__init__()
        self.power = Power()

    def forward(self, x):
        return self.power(self.read(x))


class Power(nn.Module):
    def forward(self, h):
        return h / (h * h).mean(-1, keepdim=True).sqrt()


def test_a_fix_elsewhere_is_not_shown_beside_one_at_the_place(replay):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) + 2
    report = replay(Upstream, {"x": x})
    titles = [item.title for item in report.fixes if item.verified]
    assert "(h.float() * h)" in report.fixes[0].patch
    assert "Keep read in fp32" not in titles
    assert "Keep power in fp32" in titles


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

    def forward(self, x):
        return self.head(x)


def lose_weights(number):
    model = Head()
    model.head.weight.data.view(-1)[:number] = float("nan")
    return model


def test_weights_of_which_little_is_left_are_not_mended(replay):
    report = replay(lose_weights(7), {"x": torch.ones(2, 4)}, builds=Head)
    assert (report.verdict, report.fixes) == ("state", ())
    assert any("checkpoint" in step for step in report.next_steps)
    assert "knows what belongs there" in report.search_notes[0]


@pytest.mark.parametrize(
    "loss", [pytest.param(None, marks=pytest.mark.slow), 'return (output.float() - batch["x"]).square().mean()']
)
def test_a_clamp_whose_gradients_overflow_is_no_fix(loss, replay_step):
    """Divides by the noise level, which is exactly 0 in one sample."""
    batch = {"x": torch.randn(4, 4), "level": torch.tensor([0.5, 0.0, 0.25, 1.0])}
    report = replay_step("return (x - self.lift(x)) / level[:, None]", batch, loss=loss)
    assert report.verdict == "numerics"
    tiny = [fix for fix in report.fixes if fix.verified and "min=1e-" in fix.patch]
    assert not [fix.title for fix in tiny if "min=1e-2" not in fix.patch and "min=1e-3" not in fix.patch]


CONTRAST = """
likeness = (output @ output.T).float()
others = likeness.masked_fill(torch.eye(len(output), dtype=torch.bool), float("-inf"))
return others.logsumexp(1).mean()
"""


@pytest.mark.slow
def test_a_loss_of_pairs_is_not_asked_of_one_sample(replay_step):
    """Every sample beside all others, of which a batch of one has none."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    forward = "made = self.lift(x)\nreturn made / made.norm(dim=1, keepdim=True)"
    best = replay_step(forward, {"x": x}, layers="self.lift = nn.Linear(4, 4, bias=False)", loss=CONTRAST).fixes[0]
    alone = next(check for check in best.checks if check.name == "samples to blame alone")
    assert (best.workaround is not None, best.kind) == (True, "source")
    assert (alone.status, "at another operation" in alone.text) == ("not-checked", True)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "holds"), [(1.0, True), (1e-13, False)])
def test_healthy_samples_that_failed_too_are_compared_alone(size, holds, replay_step):
    """BatchNorm carries what one row makes into every other.

    A divisor clamped to 1e-12 changes rows whose sum is below; in the whole batch there is nothing to see it by.
    """
    x = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8], [0.0, 0.0, 0.0], [0.6, 0.3, 0.1]]) * size
    report = replay_step(
        "return self.norm(x / x.sum(-1, keepdim=True))", {"x": x}, layers="self.norm = nn.BatchNorm1d(3)"
    )
    fixes = [fix for fix in report.fixes if fix.workaround is not None]
    assert fixes[0].title.startswith("Keep the divisor of div at least 1e-12" if holds else "Give div the value 0")
    (check,) = (check for check in fixes[0].checks if check.name == "healthy samples")
    assert check.text == "alone in fp32 the samples that were fine change by 0 %"


TWO_SQUARES = """
first = x[:, :1] * x[:, :1]
first = first / (1 + first)
return torch.cat([first, x[:, 1:] * x[:, 1:]], dim=1)
"""


def replay_squares(replay_step, largest_second):
    """The first square overflows in what a row has in its first column, the second in the second."""
    x = torch.ones(8, 2)
    x[0] = 0.5
    x[3, 0], x[6, 1] = 300.0, largest_second
    return replay_step(TWO_SQUARES, {"x": x.half()}, layers="").fixes


def test_variations_of_few_samples_name_them(replay_step):
    fix = replay_squares(replay_step, 100.0)[0]
    assert fix.verified
    assert {check.name: check.samples for check in fix.checks if check.samples} == dict.fromkeys(
        ("samples in another order", "small noise on the inputs", "inputs halved", "inputs doubled"), (3, 6)
    )


def test_the_largest_healthy_sample_is_among_the_few(replay_step):
    fixes = replay_squares(replay_step, 200.0)  # its square fits, that of twice as much does not
    assert ["inputs doubled"] in [failures(item) for item in fixes]
    assert [item.title for item in fixes if item.verified] == ["Keep the whole model in fp32"]


def test_what_fails_for_few_samples_is_run_on_the_whole_batch(replay_step):
    """As does a loss that needs its pairs."""
    x = torch.ones(8, 2)
    x[3, 0] = 300.0
    forward = "squares = x * x\nreturn squares / (1 + squares) / max(len(x) - 7, 0)"
    (fix, *_) = replay_step(forward, {"x": x.half()}, layers="").fixes
    checks = {check.name: check for check in fix.checks}
    assert checks["inputs doubled"].status == "passed"
    assert checks["inputs doubled"].samples is None


@pytest.mark.slow
def test_a_fix_that_agrees_with_a_wrong_fp32_is_not_verified(replay_step):
    forward = "return -torch.log(1 - torch.sigmoid(self.lift(x)) + 1e-30)"
    report = replay_step(forward, {"x": torch.tensor([[30.0, 1.0], [0.5, -2.0]])}, layers=eye(2))
    assert report.verdict == "precision"
    assert not any(fix.verified for fix in report.fixes)  # fp32 gives 69, float64 30
    assert "float64" in {name for fix in report.fixes for name in failures(fix)}
    assert report.fp32_error > 0.5


WEIGHT = "self.weight = nn.Parameter(torch.eye(2))"


def test_a_loss_that_a_small_argument_makes_up_is_refused(replay_step):
    x, loss = torch.tensor([[1.0, 2.0], [0.0, 3.0]]), "return -torch.digamma(output.float()).mean()"
    fix = replay_step("return (x @ self.weight).relu()", {"x": x}, layers=WEIGHT, loss=loss).fixes[0]
    assert "where the formula gives" in fix.workaround
    assert "clamp(min=1e-6)" in fix.patch  # with 1e-12 it is 2.5e11


KEPT = f"""{eye(2)}
self.register_buffer("peak", torch.zeros(2))
self.register_buffer("mask", torch.zeros(2, 2))
"""
SQUARES = """
hidden = self.lift(x)
self.mask = torch.full((2, 2), -torch.inf).triu(1)
self.peak.data.copy_((hidden * hidden).amax(0))
self.peaks = [self.peak.clone()]
return (hidden * hidden).float().mean(0).sqrt()
"""
QUOTIENTS = """
norms = x.norm(dim=-1, keepdim=True)
self.peak.data.copy_((x / norms).sum(0))
return self.lift(x).float() / norms
"""


@pytest.mark.slow
def test_a_guard_that_leaves_a_buffer_nan_is_told(replay_step):
    report = replay_step(QUOTIENTS, {"x": torch.tensor([[3.0, 1.0], [0.0, 0.0]])}, layers=KEPT)
    guard = next(item for item in report.fixes if item.patch.count("\n+ ") == 1 and "/ norms.clamp" in item.patch)
    assert (guard.verified, failures(guard)) == (False, ["buffers"])


def test_a_fix_that_leaves_a_buffer_infinite_is_not_verified(replay_step):
    """Squares for the output and, on a line of their own, for a buffer."""
    report = replay_step(SQUARES, {"x": torch.tensor([[300.0, 1.0], [1.0, 2.0]])}, layers=KEPT)
    assert report.verdict == "precision"
    spoilt = [item for item in report.fixes if failures(item) == ["buffers"]]
    assert spoilt
    assert spoilt[0].checks[2].text == "`peak` and `peaks[0]` are left with NaN or Inf"
    assert any(item.verified for item in report.fixes)
    assert not any(item.verified for item in spoilt)


@pytest.mark.parametrize("factor", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_loss_is_known_to_the_last_place_of_its_terms(factor, replay_step):
    forward = "hidden = x @ self.weight\nreturn hidden * hidden / (hidden * hidden).sum(-1, keepdim=True)"
    loss = f"return {factor} * (1 - torch.softmax(30 * output.float(), -1).amax(-1)).mean()"
    report = replay_step(forward, {"x": torch.tensor([[1000.0, 1.0], [9.0, 1.0]])}, layers=WEIGHT, loss=loss)
    assert report.fixes[0].verified  # the loss is 0 in fp32, and 8e-14 in float64
    assert report.fp32_error is None


def test_a_loss_of_picked_terms_is_known_better_than_the_rest(replay_step):
    loss = """
        scores = torch.log(torch.softmax(output.float(), -1)) - 1e9 * torch.eye(3)
        return -scores[:, 1].roll(1)[:1].mean()
    """
    x = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, -1.0], [0.0, -60.0, -200.0]])
    layers = "self.scale = nn.Parameter(torch.ones(3))"
    fixes = replay_step("return x * self.scale", {"x": x}, layers=layers, loss=loss).fixes
    assert not any("1e-12" in item.title and item.verified for item in fixes)  # a loss of 28 in place of 60
