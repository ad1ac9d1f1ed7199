"""Ctrl-C during the diagnosis: what was known is reported, what is missing is said, and nothing is cleared."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import nandoctor
from nandoctor.cli import main
from nandoctor.replaying.progress import Listener

BATCH = {"image": torch.ones(2, 4)}


class Pressed(nn.Module):
    """Passes its input on, and raises what Ctrl-C raises in one of its calls, counted over all runs."""

    def __init__(self, at, *, in_backward=False):
        super().__init__()
        self.at, self.in_backward = at, in_backward

    def forward(self, x):
        if self.in_backward:
            return _PressedBackward.apply(x) if x.requires_grad else x
        if next(_calls) == self.at:
            raise KeyboardInterrupt
        return x


class _PressedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyboardInterrupt


class Net(nn.Module):
    """Overflows fp16 by its scale, before and after a place to press Ctrl-C."""

    def __init__(self, scale, pressed):
        super().__init__()
        self.stem, self.first, self.pressed, self.head = nn.Linear(4, 4), Scale(scale), pressed, nn.Linear(4, 2)

    def forward(self, image):
        return self.head(self.pressed(self.first(self.stem(image))))


class Scale(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x.half() * self.scale


class Gentle(Listener):
    stops_gently = True


_calls = itertools.count(1)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(sys.modules[__name__], "_calls", itertools.count(1))


def replayed(model, path, *, saved=None, listener=None, **options):
    contents = {"state_dict": model.state_dict(), **BATCH} | ({} if saved is None else {"logit": saved})
    torch.save(contents, path)
    case = nandoctor.replay(path, model, progress=listener or Gentle(), **options)
    return case.report


NONFINITE = torch.full((2, 2), float("nan"))
OVERFLOWS, HOLDS = 1e5, 1.0


@pytest.mark.parametrize("saved", [NONFINITE, None], ids=["counted", "not counted"])
def test_the_first_run_tells_what_it_has_reached(tmp_path, saved):
    report = replayed(Net(OVERFLOWS, Pressed(1)), tmp_path / "a.pth", saved=saved)
    assert report.verdict == "interrupted"
    assert "Interrupted: first (Scale) is the first to go non-finite under fp16 autocast" in report.headline
    assert report.first_nonfinite.place.module == "first"
    assert (report.cause, report.fixes, report.reproduction.grade) == (None, (), "no-reference")
    assert any("whether it reproduces your run" in note for note in report.notes)


def test_finite_so_far_is_no_all_clear(tmp_path):
    listener = Gentle()
    report = replayed(Net(HOLDS, Pressed(1)), tmp_path / "a.pth", listener=listener)
    assert report.verdict == "interrupted"
    assert "in the 2 module calls until then" in report.headline
    assert listener.interrupted
    assert not nandoctor.case.Case(report).finite


def test_a_finished_replay_keeps_its_grade(tmp_path):
    report = replayed(Net(OVERFLOWS, Pressed(2)), tmp_path / "a.pth", saved=NONFINITE)
    assert (report.verdict, report.reproduction.grade) == ("interrupted", "same-mask")
    assert any("what fp32 gives" in note for note in report.notes)
    assert any("an intended infinity" in note for note in report.notes)
    assert report.runs.fp32.raised == "interrupted"


def test_an_earlier_attempt_is_not_lost(tmp_path):
    report = replayed(Net(HOLDS, Pressed(2)), tmp_path / "a.pth", saved=NONFINITE)
    assert (report.verdict, report.reproduction.grade) == ("interrupted", "finite")
    assert len(report.reproduction.attempts) == 1


def sum_of(output, _):
    return output.float().sum()


@pytest.mark.parametrize(
    ("scale", "loss", "verdict"),
    [(OVERFLOWS, sum_of, "precision"), (OVERFLOWS, None, "precision"), (HOLDS, sum_of, "interrupted")],
)
def test_an_interrupted_backward_clears_no_gradient(tmp_path, scale, loss, verdict):
    """Nor does it lose what the forward showed: the first backward pass there is may be the search's, in fp32."""
    model = Net(scale, Pressed(0, in_backward=True))
    report = replayed(model, tmp_path / "a.pth", loss=loss)
    assert report.verdict == verdict
    assert (report.origin is not None) == (verdict == "precision")
    assert any(note.startswith("Interrupted") and "the gradients" in note for note in report.notes)
    assert report.fixes == ()


def test_an_interrupted_backward_leaves_the_grade_known(tmp_path):
    model = Net(HOLDS, Pressed(0, in_backward=True))
    with nandoctor.cuda_autocast():
        saved = model(**BATCH).detach()
    report = replayed(model, tmp_path / "a.pth", saved=saved, loss=lambda output, batch: output.float().sum())
    assert (report.verdict, report.reproduction.grade) == ("interrupted", "exact")
    assert not any("whether it reproduces your run" in note for note in report.notes)


def test_nothing_known_is_no_report(tmp_path):
    class Early(Net):
        def forward(self, image):
            raise KeyboardInterrupt

    listener = Gentle()
    with pytest.raises(KeyboardInterrupt):
        replayed(Early(HOLDS, Pressed(0)), tmp_path / "a.pth", listener=listener, call=lambda model, batch: _early())
    assert not listener.interrupted


def _early():
    raise KeyboardInterrupt


def test_who_asks_for_no_report_gets_the_interrupt(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        replayed(Net(OVERFLOWS, Pressed(1)), tmp_path / "a.pth", listener=Listener())


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    (tmp_path / "net_of_the_test.py").write_text(
        "from test_interrupts import Net, Pressed, OVERFLOWS\n\n\ndef make():\n    return Net(OVERFLOWS, Pressed(1))\n"
    )
    torch.save({"state_dict": Net(OVERFLOWS, Pressed(1)).state_dict(), **BATCH}, tmp_path / "a.pth")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_terminal_prints_it_and_exits_with_130(workplace):
    command = ["replay", "a.pth", "--model", "net_of_the_test.py:make", "-o", "report.json"]
    result = CliRunner().invoke(main, command)
    printed = " ".join(result.stdout.split())
    assert result.exit_code == 130
    assert printed.startswith("Interrupted: first (Scale) is the first to go non-finite")
    assert "stopped early" not in printed
    assert "unchecked" not in printed
    assert result.stderr.endswith("nandoctor: interrupted; the report has what was found until then\n")
    assert json.loads((workplace / "report.json").read_text())["verdict"] == "interrupted"


def test_json_is_whole_or_not_there(workplace):
    result = CliRunner().invoke(main, ["replay", "a.pth", "--model", "net_of_the_test.py:make", "--json"])
    assert (result.exit_code, result.stdout) == (130, "")
