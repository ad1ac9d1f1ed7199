"""Fixes at a line of the loss function, and of the batch where nothing else helps."""

from pathlib import Path

import pytest
import torch
from projects import added

MIXTURE = """
import torch
from torch import nn

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.means = nn.Linear(4, 3)

    def density(self, x, y):
        return torch.exp(-((y - self.means(x)) ** 2)).sum(-1)

    def forward(self, x, y):
        return -self.density(x, y).log()

def mean(loss, batch):
    return loss.mean()

def guarded(loss, batch):
    assert loss.isfinite().all()
    return (loss * batch["weight"]).mean()

def guarded_ratio(loss, batch):
    return guarded((loss - loss) / (loss - loss), batch)
"""
TOWERS = """
image = F.normalize(self.image(image), dim=-1)
return 55000 * image @ F.normalize(self.text(text), dim=-1).T
"""
BOTH_WAYS = """
pairs = torch.arange(len(output))
rows = F.cross_entropy(output, pairs)
columns = F.cross_entropy(
    output.T,
    pairs,
)
return (rows + columns) / 2
"""
READER = """
x = self.embed(ids)
scores = (x @ x.mT).masked_fill((ids == 0)[:, None], float("-inf"))
return scores.softmax(-1) @ x
"""
OVERLAP = """

def distance(output, target, seen):
    seen[:1] = (output[:1] - target[:1]).detach()
    both = torch.min(output, target)
    common, ours, theirs = both[:, 0] * both[:, 1], output[:, 0] * output[:, 1], target[:, 0] * target[:, 1]
    return 1 - common / (ours + theirs - common)
"""
NEXT_WORD = """
return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), ignore_index=0)
"""
COSINE = """
a, b = output
return 1 - ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-6)).mean()
"""
SURROGATE = """
ratio = torch.exp(output - batch["old"])
advantage = (batch["gain"] - batch["gain"].mean()) / batch["gain"].std()
return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
"""
TWO_TERMS = """
picked = output.gather(1, batch["label"][:, None])
return -torch.log(picked).mean() + output.square().mean()
"""
SPREAD = """
logvar = self.lift(x)
return torch.exp(0.5 * logvar) * torch.linspace(-1, 1, logvar.numel()).view_as(logvar), logvar
"""
DIVERGENCE = """
sample, logvar = output
return sample.abs().mean() + (logvar.float().exp() - logvar.float()).mean()
"""


@pytest.fixture
def replay_mixture(project):
    """(name of the loss, how far y is) -> report."""

    def replay_mixture(loss, far):
        project.write_file(MIXTURE, model="Mixture", loss=loss)
        project.save(x=torch.randn(5, 4), y=torch.full((5, 1), far))
        return project.replay()

    return replay_mixture


@pytest.mark.slow
def test_every_line_of_a_loss_that_overflows_is_widened(replay_step, project):
    batch = {"image": torch.randn(16, 6), "text": torch.randn(16, 5)}
    layers = "self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)"
    fixes = replay_step(TOWERS, batch, layers=layers, loss=BOTH_WAYS).fixes
    assert added(fixes[0]) == ["output = output.float()"]
    fix = next(fix for fix in fixes if fix.verified and "rows =" in added(fix)[0])
    assert added(fix) == ["rows = F.cross_entropy(output.float(), pairs)", "output.T.float(),"]
    assert project.verdict_with(fix) == "healthy"


def test_a_function_of_a_loss_is_given_its_tensors_in_fp32(project):
    """Three areas overflow: one line where it begins is less than a change of each. What it writes to stays its own."""
    loss = 'return distance(output, batch["target"].half(), torch.zeros_like(output)).mean()'
    project.write("return 300 + self.lift(x)", layers="self.lift = nn.Linear(6, 2)", loss=loss)
    with Path("net.py").open("a") as file:
        file.write(OVERLAP)
    project.save(x=torch.randn(4, 6), target=200.0 + 300.0 * torch.rand(4, 2))
    (fix, *_) = project.replay().fixes
    assert added(fix) == ["output, target = output.float(), target.float()"]
    assert (fix.verified, project.verdict_with(fix)) == (True, "healthy")


def test_a_loss_without_a_label_left_does_not_refuse_a_fix(replay_step):
    """The empty text alone has no word to predict: its loss is 0/0 whatever the model gives."""
    ids = torch.randint(1, 9, (4, 5))
    ids[2] = 0
    fix = replay_step(READER, {"ids": ids}, layers="self.embed = nn.Embedding(9, 9)", loss=NEXT_WORD).fixes[0]
    assert (fix.verified, fix.kind) == (True, "source")
    (alone,) = (check for check in fix.checks if check.name == "samples to blame alone")
    assert alone.status == "not-checked"


def test_infinities_that_are_meant_stay_in_the_output(replay_step):
    """Forbidden actions score -inf: the product of the loss is to blame for 0 * -inf, and they are not."""
    allowed = torch.ones(4, 5)
    allowed[1:, 2] = 0
    wanted = torch.eye(5)[[0, 1, 3, 4]]
    forward = 'return self.lift(x).masked_fill(allowed == 0, float("-inf"))'
    loss = 'return -(batch["wanted"] * torch.log_softmax(output, -1)).sum(-1).mean()'
    batch = {"x": torch.randn(4, 6), "allowed": allowed, "wanted": wanted}
    report = replay_step(forward, batch, inputs="x, allowed", layers="self.lift = nn.Linear(6, 5)", loss=loss)
    assert (report.verdict, report.origin.source.text) == ("numerics", loss)
    fix = report.fixes[0]
    assert fix.verified
    assert added(fix) == ['return -(batch["wanted"] * torch.log_softmax(output, -1).clamp(min=-10000)).sum(-1).mean()']
    output = next(check for check in fix.checks if check.name == "output")
    assert output.text.startswith("finite except for infinities that fp32 has there too")


@pytest.mark.slow
def test_an_infinity_that_a_loss_does_not_forgive_is_mended(replay_step):
    """The loss cuts -inf off, and its gradients are NaN all the same: where log gets 0 is the place to change.

    What the model returns is another number then, though not to this loss.
    """
    present = torch.ones(4, 4)
    present[2] = 0
    forward, loss = "return (self.lift(x).sigmoid() * present).sum(-1).log()", "return output.clamp(min=-5).mean()"
    batch = {"x": torch.randn(4, 4), "present": present}
    fix = replay_step(forward, batch, loss=loss).fixes[0]
    assert fix.workaround.endswith("where the formula gives -Inf")
    assert all(".clamp(min=1e-" in line and line.endswith(".log()") for line in added(fix))
    assert next(check for check in fix.checks if check.name == "output").text.startswith("finite, ")


@pytest.mark.slow
def test_an_output_that_was_sound_refuses_no_change_of_the_loss(project):
    """fp16 rounds the terms of a small vector by over 1 % of what is left, with the change of the loss as without."""
    layers = "self.encode = nn.Sequential(nn.Linear(10, 16), nn.ReLU())"
    project.write("return self.encode(a), self.encode(b)", inputs="a, b", layers=layers, loss=COSINE)
    model = project.build()
    model.encode[0].bias.data -= 1.2
    a, (weight, bias) = torch.randn(12, 10), (model.encode[0].weight[0], model.encode[0].bias[0])
    a[0] = (weight * (0.01 - bias) / weight.square().sum()).detach()
    project.save(model.state_dict(), a=a, b=torch.randn(12, 10))
    fix = project.replay().fixes[0]
    assert (fix.verified, fix.kind) == (True, "source")
    assert "within what rounding costs here" in fix.checks[0].text


def test_a_loss_that_no_scale_fits_is_no_fix(replay_step):
    """exp(80) is finite and passes; the batch of one sample, of which the spread is unknown, warns of it to nobody."""
    batch = {"x": torch.randn(8, 6), "old": -100 * torch.rand(8) - 300, "gain": torch.randn(8)}
    more = {"inputs": "x", "layers": "self.lift = nn.Linear(6, 1)", "loss": SURROGATE}
    fix = replay_step("return self.lift(x)[:, 0]", batch, **more).fixes[0]
    assert "where the formula gives +Inf" in fix.workaround
    assert added(fix) == ['ratio = torch.exp((output - batch["old"]).clamp(max=20))']


@pytest.mark.slow
def test_a_change_that_teaches_nothing_says_so(replay_mixture):
    """log(1e-12) has no gradient: the step passes, and no weight would move."""
    fix = replay_mixture("mean", 4e8).fixes[0]
    gradients = next(check for check in fix.checks if check.name == "gradients")
    assert "all are 0, so the model learns nothing from this batch" in gradients.text
    assert "where the formula gives +Inf" in fix.workaround


@pytest.mark.slow
def test_a_loss_whose_error_the_nan_had_hidden_is_left_out(replay_mixture):
    """The step was never watched, so its batch has no weight: "still non-finite" would be said of each change."""
    report = replay_mixture("guarded", 4e8)
    assert report.fixes[0].workaround is not None
    assert any("raised KeyError" in note for note in report.notes)


def test_a_loss_in_which_the_failure_is_is_not_left_out(replay_mixture):
    """Without it nothing fails, and any change would pass."""
    report = replay_mixture("guarded_ratio", 0.0)
    assert (report.origin.phase, report.fixes) == ("loss", ())
    assert any("fails in its loss" in note for note in report.search_notes)


@pytest.mark.slow
def test_a_loss_with_an_infinite_term_is_compared(replay_step):
    """Of an infinite sum no digit is known: that must not excuse every other value of it."""
    batch = {"x": torch.randn(8, 6), "label": torch.randint(0, 5, (8,))}
    forward = "return torch.softmax(self.lift(x) * 150, dim=-1)"
    report = replay_step(forward, batch, inputs="x", layers="self.lift = nn.Linear(6, 5)", loss=TWO_TERMS)
    assert (report.verdict, report.cause.code) == ("numerics", "log-of-zero")
    assert not any(fix.verified for fix in report.fixes if "torch.log" in fix.patch)
    assert max(fix.outcome.max_rel_err for fix in report.fixes) > 0.1


def test_a_change_that_is_off_says_why_and_what_to_do(replay_step):
    """It was written and run: what it failed is told, and what the page of the cause advises."""
    x = torch.randn(6, 10)
    x[4] *= 400
    report = replay_step(SPREAD, {"x": x}, layers="self.lift = nn.Linear(10, 4)", loss=DIVERGENCE)
    assert not any(fix.verified for fix in report.fixes)
    assert any(note.startswith("By hand: Clamp the argument") for note in report.search_notes)
    finite = [fix for fix in report.fixes if not fix.verified and fix.outcome.finite]
    assert finite
    assert all(any(check.status == "failed" for check in fix.checks) for fix in finite)
