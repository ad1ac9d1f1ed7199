"""Whether a failing step passes now: `nandoctor verify`, `replay --check`, `nandoctor.verify`."""

import importlib
import json
import os
import shlex
import sys

import jsonschema
import pytest
import torch
from commands import run, words
from report_schema import describe_schema
from torch import nn

import nandoctor
from nandoctor import Recorder, cuda_autocast
from nandoctor.evidence.verification import Verification

SICK = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, norm=True, dropout=0.0):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.head = nn.Conv2d(4, 1, 1)
        self.dropout = dropout

    def forward(self, image):
        x = self.conv(image)
        variance = x.var(dim=(2, 3), keepdim=True, unbiased=False)
        x = (x - x.mean(dim=(2, 3), keepdim=True)) / torch.sqrt(variance + 1e-8)
        return {"logit": self.head(F.dropout(F.gelu(self.norm(x)), self.dropout, self.training))}

class Plain(Net):
    def __init__(self):
        super().__init__(norm=False)

class Dropping(Net):
    def __init__(self):
        super().__init__(norm=False, dropout=0.5)

def loss_of(output, batch):
    return output["logit"].mean()
"""
FIXED_LINE = ("1e-8", "1e-4")


@pytest.fixture
def project(here, monkeypatch):
    """A folder that somebody trains in, with the code of a model that fails on a blank image."""
    (here / "net.py").write_text(SICK)
    monkeypatch.syspath_prepend(here)
    yield here
    sys.modules.pop("net", None)


def failing_step(name):
    """The file as a module, a model of it, and a batch with a blank image."""
    torch.manual_seed(0)
    net = importlib.import_module("net")
    model, image = getattr(net, name)(), torch.randn(4, 3, 8, 8)
    image[1] = 0
    return net, model, image


def write_dump(project, name="Net"):
    """What a training script saves when the output is NaN: buffers as the failing forward left them."""
    _, model, image = failing_step(name)
    with cuda_autocast():
        logit = model(image)["logit"].detach()
    torch.save({"state_dict": model.state_dict(), "image": image, "logit": logit}, project / "dump.pth")
    sys.modules.pop("net")
    return project / "dump.pth"


def record_dump(*, loss="loss_of", spoil=1.0):
    """The same step as the recorder saves it; the loop's own loss is multiplied by `spoil`."""
    net, model, image = failing_step("Net")
    recorder = Recorder(model, loss=loss and getattr(net, loss))
    with recorder.step((image,)), cuda_autocast():
        recorder.watch(net.loss_of(model(image), (image,)) * spoil)
    recorder.close()
    sys.modules.pop("net")
    return recorder.written[0]


def edit(project, *, old=FIXED_LINE[0], new=FIXED_LINE[1], seconds=1):
    """Change the file, that many seconds after now."""
    path = project / "net.py"
    path.write_text(path.read_text().replace(old, new))
    later = path.stat().st_mtime + seconds
    os.utime(path, (later, later))


def test_a_batch_norm_model_that_was_fixed_is_fixed(project):
    dump = write_dump(project)
    assert not torch.load(dump)["state_dict"]["norm.running_mean"].isfinite().any()
    before = run("verify", dump, "--model", "net.py:Net")
    edit(project)
    after = run("verify", dump, "--model", "net.py:Net")
    assert (before.exit_code, after.exit_code) == (1, 0)
    assert "net.py:17: x = (x - x.mean" in words(before.stdout)
    assert after.stdout.startswith("FIXED: the step that failed passes now\n")
    assert "in train mode" in after.stdout
    assert "The saved state still holds NaN or Inf: `norm.running_mean`" in words(after.stdout)
    assert run("replay", dump, "--model", "net.py:Net", "--check").exit_code == 0


def test_poisoned_buffers_without_a_change_cannot_be_told(project):
    dump = write_dump(project)
    edit(project, seconds=-3600)  # what fails is eval mode, of a model that is sound in train mode
    result = run("verify", dump, "--model", "net.py:Net")
    assert result.exit_code == 125
    assert "no file of the model has changed" in words(result.stdout)
    saved = torch.load(dump)
    torch.save({name: value for name, value in saved.items() if name != "logit"}, dump)
    assert run("verify", dump, "--model", "net.py:Net").exit_code == 1


def test_the_changed_file_is_told_by_the_recorders_hashes(project):
    dump = record_dump()
    assert run("verify", dump).exit_code == 1
    edit(project)
    result = run("verify", dump)
    assert result.exit_code == 0
    assert "changed net.py since the dump was written" in words(result.stdout)
    assert "gradients of the loss finite at loss scale" in words(result.stdout)
    report = nandoctor.replay(dump, fixes=False).report
    assert report.verdict == "fixed"
    assert report.headline == (
        "Your code has changed since, and the step passes now: net.py since the dump was written."
    )


def test_a_replay_without_hashes_says_what_can_be_said(project):
    dump = write_dump(project, "Plain")
    edit(project)
    result = run("replay", dump, "--model", "net.py:Plain")
    assert result.exit_code == 3
    assert "Written after the dump: net.py. If that was your fix, it works" in words(result.stdout)


def test_nothing_changed_is_no_fix(project):
    """The loop saw a NaN that a replay of the same code does not show: whatever that is, nobody has fixed it."""
    edit(project)
    dump = record_dump(spoil=float("nan"))
    assert run("replay", dump, "--check").exit_code == 125
    result = run("verify", dump)
    assert result.exit_code == 125
    assert "nothing has changed since the dump was written (net.py)" in words(result.stdout)


def test_a_plain_dump_that_nothing_explains_cannot_be_told(project):
    dump = write_dump(project, "Plain")
    edit(project, seconds=-3600)
    assert f"nandoctor verify {dump} --model net.py:Net" in words(run("verify", dump).stdout)
    result = run("verify", dump, "--model", "net.py:Plain")
    assert (result.exit_code, result.stdout.partition(":")[0]) == (125, "CANNOT TELL")
    assert "next --model" not in words(result.stdout)
    assert "--changed FILE" in result.stdout
    for file, code in {"net.py": 0, "ent.py": 125, dump: 125}.items():  # a typo turns no gate green
        assert run("verify", dump, "--model", "net.py:Plain", "--changed", file).exit_code == code


def test_a_change_to_other_values_is_told_as_one(project):
    dump = write_dump(project, "Plain")
    edit(project, old="+ 1e-8)", new="+ 1) * 0.5")
    verification = nandoctor.verify(dump, "net.py:Plain")
    assert (verification.outcome, verification.output.finite) == ("cannot-tell", True)
    assert "no dump can confirm it" in verification.next_steps[0]


def test_the_command_of_an_error_keeps_what_was_typed(project):
    state, array = nn.Bilinear(2, 2, 1).state_dict(), torch.ones(1, 2)
    torch.save({"state_dict": state, "a": array, "b": array + 1}, "two.pth")
    widths = [f"--model-arg={name}_features={size}" for name, size in (("in1", 2), ("in2", 2), ("out", 1))]
    told = run("replay", "two.pth", "--no-fixes", "--model", "torch.nn:Bilinear", *widths)
    assert run(*shlex.split(told.stderr.splitlines()[-1])[1:]).exit_code == 0


ANNEALED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.temperature = 1.0

    def forward(self, x):
        scores = self.query(x) @ x.t()  # fp16
        return torch.softmax(scores / self.temperature, -1)
"""


@pytest.mark.parametrize(
    ("recorded", "old", "new", "reason"),
    [
        (True, "  # fp16", "  # in half precision", "Nothing has changed"),
        (True, "        return", "\n        # Every row adds up to 1.\n        return", "Nothing has changed"),
        (False, "-1)", "dim=-1)", "finite values of the saved output are up to"),
        (None, "-1)", "dim=-1)", "None of the outputs is known to be the saved output"),
    ],
)
def test_edits_that_change_nothing_are_no_fix(project, recorded, old, new, reason):
    """The loop set an attribute that is in no state dict, so the replay is finite whatever the code."""
    (project / "net.py").write_text(ANNEALED)
    net, x = importlib.import_module("net").Net(), torch.randn(4, 6)
    net.temperature = 1e-5  # too small for some rows
    if recorded:
        recorder = Recorder(net)
        with recorder.step(x), cuda_autocast():
            recorder.watch(net(x))
        recorder.close()
        dump = recorder.written[0]
    else:
        with cuda_autocast():
            output = net(x).detach()[:, : 4 if recorded is False else 3]  # or a part of it
        torch.save({"state_dict": net.state_dict(), "x": x, "output": output}, dump := project / "dump.pth")
    sys.modules.pop("net")
    assert run("verify", dump, "--model", "net.py:Net").exit_code == 125
    edit(project, old=old, new=new)
    verification = nandoctor.verify(dump, "net.py:Net")
    assert verification.outcome == "cannot-tell"
    assert any(reason in text for text in verification.reasons)
    assert run("replay", dump, "--model", "net.py:Net", "--check").exit_code == 125


def test_dropout_without_its_random_state_cannot_be_told(project):
    dump = write_dump(project, "Dropping")
    edit(project)
    result = run("verify", dump, "--model", "net.py:Dropping")
    assert result.exit_code == 125
    assert "draws random numbers" in words(result.stdout)
    assert run("verify", dump, "--model", "net.py:Dropping", "--seed", "0").exit_code == 0


def test_a_loss_that_is_not_replayed_cannot_be_told(project):
    edit(project)
    dump = record_dump(loss=None, spoil=float("nan"))
    edit(project, old="1e-4", new="1e-3")
    result = run("verify", dump)
    assert result.exit_code == 125
    assert "which was not replayed" in words(result.stdout)
    assert "--loss FILE.py:NAME" in result.stdout
    case = nandoctor.replay(dump)
    assert (case.verdict, case.finite) == ("cannot-tell", False)


def test_what_cannot_be_run_cannot_be_told(project):
    dump = write_dump(project, "Plain")
    for arguments in ((dump,), ("nowhere.pth",), (dump, "--model", "net.py:loss_of")):
        result = run("verify", *arguments, "--json")
        assert result.exit_code == 125
        assert json.loads(result.stdout)["outcome"] == "cannot-tell"
        assert result.stderr == ""


def test_json_is_the_whole_verification(project):
    dump = record_dump()
    for code in (1, 0):
        result = run("verify", dump, "--json")
        plain = json.loads(result.stdout)
        jsonschema.validate(plain, describe_schema(Verification, title="verification"))
        assert (plain["schema"], result.exit_code) == ("nandoctor.verification/4", code)
        edit(project)
    assert plain["code"]["changes"] == [{"file": "net.py", "known_by": "hash"}]


def test_a_check_of_a_silent_overflow_fails(project):
    class RootMeanSquare(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True))

    model = RootMeanSquare(2, 2)
    torch.save({"state_dict": model.state_dict(), "x": torch.full((2, 2), 1e3)}, "silent.pth")
    assert nandoctor.replay("silent.pth", model, fixes=False).verdict == "silent"
    assert nandoctor.verify("silent.pth", model).exit_code == 1
