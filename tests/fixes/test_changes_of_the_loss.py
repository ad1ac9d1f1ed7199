"""Fixes at a line of the loss function, and of the batch where nothing else helps."""

import subprocess

import pytest
import torch

import nandoctor

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(6, 4)
        self.text = nn.Linear(5, 4)

    def forward(self, image, text):
        image = F.normalize(self.image(image), dim=-1)
        return 55000 * image @ F.normalize(self.text(text), dim=-1).T

def both_ways(logits, batch):
    pairs = torch.arange(len(logits))
    rows = F.cross_entropy(logits, pairs)
    columns = F.cross_entropy(
        logits.T,
        pairs,
    )
    return (rows + columns) / 2

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.means = nn.Linear(4, 3)

    def density(self, x, y):
        return torch.exp(-((y - self.means(x)) ** 2)).sum(-1)

    def forward(self, x, y):
        return -self.density(x, y).log()

def mean_loss(loss, batch):
    return loss.mean()

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 9)

    def forward(self, ids):
        x = self.embed(ids)
        scores = (x @ x.mT).masked_fill((ids == 0)[:, None], float("-inf"))
        return scores.softmax(-1) @ x

class Actions(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(6, 5)

    def forward(self, x, allowed):
        return self.score(x).masked_fill(allowed == 0, float("-inf"))

def by_hand(logits, batch):
    return -(batch["wanted"] * torch.log_softmax(logits, -1)).sum(-1).mean()

class Vote(nn.Module):
    def __init__(self):
        super().__init__()
        self.weigh = nn.Linear(4, 4)

    def forward(self, x, present):
        return (self.weigh(x).sigmoid() * present).sum(-1).log()

def capped(scores, batch):
    return scores.clamp(min=-5).mean()

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(10, 16), nn.ReLU())

    def forward(self, a, b):
        return self.encode(a), self.encode(b)

def cosine(pair, batch):
    a, b = pair
    return 1 - ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-6)).mean()

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.logp = nn.Linear(6, 1)

    def forward(self, x):
        return self.logp(x)[:, 0]

def surrogate(logp, batch):
    ratio = torch.exp(logp - batch["old"])
    advantage = (batch["gain"] - batch["gain"].mean()) / batch["gain"].std()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

def next_word(logits, batch):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), ignore_index=0)

class Spread(nn.Module):
    def __init__(self):
        super().__init__()
        self.logvar = nn.Linear(10, 4)

    def forward(self, x):
        logvar = self.logvar(x)
        return torch.exp(0.5 * logvar) * torch.linspace(-1, 1, logvar.numel()).view_as(logvar), logvar

def divergence(output, batch):
    sample, logvar = output
    return sample.abs().mean() + (logvar.float().exp() - logvar.float()).mean()

class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(6, 5)

    def forward(self, x):
        return torch.softmax(self.score(x) * 150, dim=-1)

def two_terms(p, batch):
    picked = p.gather(1, batch["label"][:, None])
    return -torch.log(picked).mean() + p.square().mean()

def guarded(loss, batch):
    assert loss.isfinite().all()
    return (loss * batch["weight"]).mean()

def guarded_ratio(loss, batch):
    return guarded((loss - loss) / (loss - loss), batch)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE)
    torch.manual_seed(0)
    return tmp_path


def save(model, **arrays):
    torch.save({"state_dict": model.state_dict(), **arrays}, "dump.pth")


def test_every_line_of_a_loss_that_overflows_is_widened(project):
    model = torch.nn.ModuleDict({"image": torch.nn.Linear(6, 4), "text": torch.nn.Linear(5, 4)})
    save(model, image=torch.randn(6, 6), text=torch.randn(6, 5))
    fix = nandoctor.replay("dump.pth", "net.py:Towers", loss="net.py:both_ways").report.fixes[0]
    changed = [line[1:].strip() for line in fix.patch.splitlines()[3:] if line.startswith("+")]
    assert (fix.verified, changed) == (True, ["rows = F.cross_entropy(logits.float(), pairs)", "logits.T.float(),"])
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    changed = nandoctor.replay("dump.pth", "net.py:Towers", loss="net.py:both_ways", fixes=False)
    assert changed.verdict == "healthy"


def test_a_batch_without_a_sample_is_compared_with_itself(project):
    """The sample is fine in float64, which is no reference for a batch that it is not in."""
    y = torch.zeros(5, 1)
    y[3] = 20.0
    save(torch.nn.ModuleDict({"means": torch.nn.Linear(4, 3)}), x=torch.randn(5, 4), y=y)
    report = nandoctor.replay("dump.pth", "net.py:Mixture").report
    fix = next(fix for fix in report.fixes if fix.kind == "data")
    assert fix.verified
    assert "kept = [0, 1, 2, 4]" in fix.patch


def test_a_loss_without_a_label_left_does_not_refuse_a_fix(project):
    """The empty text alone has no word to predict: its loss is 0/0 whatever the model gives."""
    ids = torch.randint(1, 9, (4, 5))
    ids[2] = 0
    save(torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 9)}), ids=ids)
    fix = nandoctor.replay("dump.pth", "net.py:Reader", loss="net.py:next_word").report.fixes[0]
    assert (fix.verified, fix.kind) == (True, "source")
    (alone,) = (check for check in fix.checks if check.name == "samples to blame alone")
    assert alone.status == "not-checked"


def added(fix):
    return [line[1:].strip() for line in fix.patch.splitlines()[3:] if line.startswith("+")]


def test_infinities_that_are_meant_stay_in_the_output(project):
    """Forbidden actions score -inf: the product of the loss is to blame for 0 * -inf, and they are not."""
    allowed = torch.ones(4, 5)
    allowed[1:, 2] = 0
    wanted = torch.eye(5)[[0, 1, 3, 4]]
    save(torch.nn.ModuleDict({"score": torch.nn.Linear(6, 5)}), x=torch.randn(4, 6), allowed=allowed, wanted=wanted)
    report = nandoctor.replay("dump.pth", "net.py:Actions", loss="net.py:by_hand").report
    assert (report.verdict, report.origin.source.line) == ("numerics", 58)
    fix = report.fixes[0]
    assert fix.verified
    assert added(fix) == ['return -(batch["wanted"] * torch.log_softmax(logits, -1).clamp(min=-10000)).sum(-1).mean()']
    output = next(check for check in fix.checks if check.name == "output")
    assert output.text.startswith("finite except for infinities that fp32 has there too")


def test_an_infinity_that_a_loss_does_not_forgive_is_mended(project):
    """The loss cuts -inf off, and its gradients are NaN all the same: where log gets 0 is the place to change."""
    present = torch.ones(4, 4)
    present[2] = 0
    save(torch.nn.ModuleDict({"weigh": torch.nn.Linear(4, 4)}), x=torch.randn(4, 4), present=present)
    report = nandoctor.replay("dump.pth", "net.py:Vote", loss="net.py:capped").report
    fix = report.fixes[0]
    assert fix.verified
    assert all(".clamp(min=1e-" in line and line.endswith(".log()") for line in added(fix))
    assert next(check for check in fix.checks if check.name == "output").text.startswith("finite, ")


@pytest.mark.slow
def test_an_output_that_was_sound_refuses_no_change_of_the_loss(project):
    """fp16 rounds the terms of a small vector by over 1 % of what is left, with the change of the loss as without."""
    model = torch.nn.ModuleDict({"encode": torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU())})
    model.encode[0].bias.data -= 1.2
    a, (weight, bias) = torch.randn(12, 10), (model.encode[0].weight[0], model.encode[0].bias[0])
    a[0] = (weight * (0.01 - bias) / weight.square().sum()).detach()
    save(model, a=a, b=torch.randn(12, 10))
    fix = nandoctor.replay("dump.pth", "net.py:Pair", loss="net.py:cosine").report.fixes[0]
    assert (fix.verified, fix.kind) == (True, "source")
    assert "within what rounding costs here" in fix.checks[0].text


def test_a_loss_that_no_scale_fits_is_no_fix(project):
    """exp(80) is finite and passes; the batch of one sample, of which the spread is unknown, warns of it to nobody."""
    model = torch.nn.ModuleDict({"logp": torch.nn.Linear(6, 1)})
    save(model, x=torch.randn(8, 6), old=-100 * torch.rand(8) - 300, gain=torch.randn(8))
    fix = nandoctor.replay("dump.pth", "net.py:Policy", loss="net.py:surrogate").report.fixes[0]
    assert "where the formula gives +Inf" in fix.workaround
    assert added(fix) == ['ratio = torch.exp((logp - batch["old"]).clamp(max=20))']


@pytest.mark.slow
def test_a_change_that_teaches_nothing_says_so(project):
    """log(1e-12) has no gradient: the step passes, and no weight would move."""
    save(torch.nn.ModuleDict({"means": torch.nn.Linear(4, 3)}), x=torch.randn(5, 4), y=torch.full((5, 1), 4e8))
    fix = nandoctor.replay("dump.pth", "net.py:Mixture", loss="net.py:mean_loss").report.fixes[0]
    gradients = next(check for check in fix.checks if check.name == "gradients")
    assert "all are 0, so the model learns nothing from this batch" in gradients.text
    assert "where the formula gives +Inf" in fix.workaround


@pytest.mark.slow
def test_a_loss_whose_error_the_nan_had_hidden_is_left_out(project):
    """The step was never watched, so its batch has no weight: "still non-finite" would be said of each change."""
    save(torch.nn.ModuleDict({"means": torch.nn.Linear(4, 3)}), x=torch.randn(5, 4), y=torch.full((5, 1), 4e8))
    report = nandoctor.replay("dump.pth", "net.py:Mixture", loss="net.py:guarded").report
    assert report.fixes[0].workaround is not None
    assert any("raised KeyError" in note for note in report.notes)


def test_a_loss_in_which_the_failure_is_is_not_left_out(project):
    """Without it nothing fails, and any change would pass."""
    save(torch.nn.ModuleDict({"means": torch.nn.Linear(4, 3)}), x=torch.randn(5, 4), y=torch.zeros(5, 1))
    report = nandoctor.replay("dump.pth", "net.py:Mixture", loss="net.py:guarded_ratio").report
    assert (report.origin.phase, report.fixes) == ("loss", ())
    assert any("fails in its loss" in note for note in report.search_notes)


def test_a_loss_with_an_infinite_term_is_compared(project):
    """Of an infinite sum no digit is known: that must not excuse every other value of it."""
    model = torch.nn.ModuleDict({"score": torch.nn.Linear(6, 5)})
    save(model, x=torch.randn(8, 6), label=torch.randint(0, 5, (8,)))
    report = nandoctor.replay("dump.pth", "net.py:Classes", loss="net.py:two_terms").report
    assert (report.verdict, report.cause.code) == ("numerics", "log-of-zero")
    assert not any(fix.verified for fix in report.fixes if "torch.log" in fix.patch)
    assert max(fix.outcome.max_rel_err for fix in report.fixes) > 0.1


def test_a_change_that_is_off_says_why_and_what_to_do(project):
    """It was written and run: what it failed is told, and what the page of the cause advises."""
    x = torch.randn(6, 10)
    x[4] *= 400
    save(torch.nn.ModuleDict({"logvar": torch.nn.Linear(10, 4)}), x=x)
    report = nandoctor.replay("dump.pth", "net.py:Spread", loss="net.py:divergence").report
    assert [fix.kind for fix in report.fixes if fix.verified] == ["data"]
    assert any(note.startswith("By hand: Clamp the argument") for note in report.search_notes)
    finite = [fix for fix in report.fixes if not fix.verified and fix.outcome.finite]
    assert finite
    assert all(any(check.status == "failed" for check in fix.checks) for fix in finite)
