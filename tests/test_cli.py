"""The command line: what goes where, and with which exit code."""

import json
import math
import shlex
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from commands import run
from tiny_models import Overflowing
from torch import nn

from nandoctor import cli
from nandoctor.cli import find_verb
from nandoctor.step.settings import OPTIONS
from nandoctor.views.fixes import command_arguments

IMAGE = np.ones((2, 4), np.float32)
NONFINITE = np.full((2, 4), np.nan, np.float32)
MODELS = """
from tiny_models import Overflowing
from torch import nn

def healthy(width=4):
    return nn.Linear(width, width)

def broken():
    raise RuntimeError("no such backbone")
"""


@pytest.fixture(autouse=True)
def workplace(here, monkeypatch):
    """A folder with two dumps and the code of their models, and nothing of it left in Python's state."""
    (here / "models_of_the_test.py").write_text(MODELS)
    torch.save({"state_dict": Overflowing().state_dict(), "image": IMAGE, "logit": NONFINITE}, here / "sick.pth")
    torch.save({"state_dict": nn.Linear(4, 4).state_dict(), "image": IMAGE, "logit": NONFINITE}, here / "lost.pth")
    torch.save({"state_dict": nn.Linear(4, 4).state_dict(), "image": IMAGE}, here / "well.pth")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return here


SICK = ("sick.pth", "--model", "models_of_the_test.py:Overflowing")
LOST = ("lost.pth", "--model", "models_of_the_test.py:healthy")
WELL = ("well.pth", "--model", "models_of_the_test.py:healthy")


@pytest.mark.parametrize("given", [["--model", "models_of_the_test.py:Made"], ["--model=models_of_the_test.py:Made"]])
def test_an_error_prints_the_whole_command_with_what_it_lacks(given, tmp_path):
    torch.save({"state_dict": {"stem.weight": torch.ones(1)}, "image": IMAGE}, "my dump.pth")
    made = "from torch import nn\nclass Made(nn.Module):\n    def __init__(self, width): self.stem = width\n"
    (tmp_path / "models_of_the_test.py").write_text(made)
    (tmp_path / "other.py").write_text("from models_of_the_test import Made\nopen('ran', 'w')\nnet = Made(max(4, 3))\n")
    result = run("replay", "my dump.pth", *given, "--json")
    assert (result.exit_code, (tmp_path / "ran").exists()) == (1, False)
    assert result.stderr.splitlines()[-1] == "  nandoctor replay 'my dump.pth' --json --model other.py:net"


@pytest.mark.parametrize(("dump", "code"), [(SICK, 0), (WELL, 0), (LOST, 3)], ids=["analysed", "healthy", "lost"])
def test_exit_codes_of_a_replay(dump, code):
    result = run("replay", *dump)
    assert result.exit_code == code
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (SICK, 1),
        (WELL, 0),
        (LOST, 125),
        (("sick.pth",), 125),
        (("nowhere.pth",), 125),
        (("sick.pth", "--model", "models_of_the_test.py:broken"), 125),
    ],
)
def test_exit_codes_of_a_check(arguments, code):
    result = run("replay", *arguments, "--check")
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("nandoctor: ") is (code == 125)


def test_a_check_of_a_damaged_dump_tells_what_is_missing(workplace):
    (workplace / "cut.pth").write_bytes((workplace / "sick.pth").read_bytes()[:700])
    result = run("replay", "cut.pth", *SICK[1:], "--check", "--json", "-o", "report.json")
    assert (result.exit_code, result.stdout) == (125, "")
    assert not (workplace / "report.json").exists()


def test_an_interrupt_ends_with_130(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("nandoctor.case.replay_dump", interrupt)
    result = run("replay", *SICK)
    assert (result.exit_code, result.stderr) == (130, "nandoctor: interrupted\n")


def test_an_interrupted_search_leaves_the_report_so_far(monkeypatch, workplace):
    import nandoctor.fixes.search

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(nandoctor.fixes.search, "vary_settings", interrupted)
    result = run("replay", *SICK, "-o", "report.md")
    assert result.exit_code == 130
    assert "Fix, verified: " in result.stdout
    assert "Interrupted: the search for fixes is not complete" in " ".join(result.stdout.split())
    assert "other settings" in (workplace / "report.md").read_text(encoding="utf-8")
    assert result.stderr.endswith("nandoctor: interrupted; the report has what was found until then\n")


def test_the_diagnosis_is_printed_before_a_fix_is_tried(monkeypatch):
    import nandoctor.pipeline

    def fails(*_, **__):
        raise RuntimeError("the search")

    monkeypatch.setattr(nandoctor.pipeline, "search_fixes", fails)
    result = run("replay", *SICK)
    assert result.stdout.startswith("`self.scale(image)` reaches 120,000; fp16 stops at 65,504\n")
    assert "reproduces" in result.stdout
    assert isinstance(result.exception, RuntimeError)


def test_a_file_is_written_though_nobody_reads_the_screen(monkeypatch, workplace):
    for screen in ("nandoctor.views.progress", "nandoctor.cli.shared"):
        monkeypatch.setattr(f"{screen}.print_document", mock.Mock(side_effect=BrokenPipeError))
    assert run("replay", *SICK, "-o", "unread.md").exit_code == 141
    assert (workplace / "unread.md").exists()


RUN = frozenset({"model", "step"})
VERBS = {"replay": RUN | {"fixes"}, "fix": RUN | {"fixes"}, "verify": RUN, "plot": RUN, "repro": RUN}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_offers_the_settings_that_it_acts_on(verb):
    offered = {flag for parameter in find_verb(verb).params for flag in parameter.opts}
    flags = {option.flag for option in OPTIONS.values() if option.group in VERBS[verb]}
    flags -= {"--no-fixes"} if verb == "fix" else set()
    assert flags <= offered
    assert offered.isdisjoint({option.flag for option in OPTIONS.values()} - flags)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_examples_of_a_verb_are_understood_by_it(verb):
    command = find_verb(verb)
    _, *examples = command.epilog.splitlines()
    assert examples
    for example in examples:
        _, name, *words = shlex.split(example.partition(" | ")[0])
        assert name == verb
        command.make_context(verb, words)
        assert f"  {example}\n" in run(verb, "--help").stdout


def test_every_setting_can_be_given_by_its_flag(monkeypatch):
    kept = {}
    monkeypatch.setattr("nandoctor.case.replay", lambda _, **given: kept.update(given))
    values = {
        **{"--model": "m.py:f", "--model-arg": "width=4", "--inputs": "a,b"},
        **{"--call": "m.py:g", "--loss": "m.py:h", "--loss-scale": "2", "--output": "logit", "--seed": "0"},
        **{"--amp-dtype": "bfloat16", "--policy": "native", "--mode": "eval", "--device": "cuda:1"},
        **{"--max-trials": "inf", "--time": "0", "--weights": "step7.pt"},
    }
    flags = ["--no-strict", "--no-fixes"]
    run("replay", "sick.pth", *(word for pair in values.items() for word in pair), *flags)
    assert {option.flag for option in OPTIONS.values()} == {*values, *flags}
    assert {name: kept[name] for name in OPTIONS} == {
        **{"model": "m.py:f", "model_args": {"width": 4}, "inputs": "a,b"},
        **{"call": "m.py:g", "loss": "m.py:h", "loss_scale": 2.0, "output": "logit", "seed": 0, "strict": False},
        **{"amp_dtype": "bfloat16", "policy": "native", "mode": "eval", "device": "cuda:1"},
        **{"max_trials": math.inf, "time": 0.0, "fixes": False, "weights": "step7.pt"},
    }


def test_an_argument_that_is_an_object_is_typed_as_it_was():
    given = {"model": "m.py:f", "model_args": {"cfg": "m.py:CFG", "width": 4}}
    flags = ("--model", "m.py:f", "--model-arg", "cfg=m.py:CFG", "--model-arg", "width=4")
    assert command_arguments(Path("a.pth"), given) == ("a.pth", *flags)
    assert command_arguments(Path("a.pth"), {"model_args": {"cfg": object()}}) == ()


def test_several_files_are_written_and_named_on_standard_error(workplace):
    result = run("replay", *SICK, "--json", "-o", "report.json", "-o", "ranges.png")
    assert json.loads(result.stdout) == json.loads((workplace / "report.json").read_text())
    assert (workplace / "ranges.png").read_bytes().startswith(b"\x89PNG")
    assert result.stderr.splitlines() == ["Wrote report.json", "Wrote ranges.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay"], "Missing argument 'DUMP'"),
        (["replay", "sick.pth", "--mdoel", "x"], "No such option"),
        (["replay", "sick.pth", "--amp-dtype", "fp16"], "'fp16' is not one of 'float16', 'bfloat16'"),
        (["replay", "sick.pth", "--seed", "x"], "'x' is not a valid integer"),
        (["replay", "sick.pth", "--loss-scale", "0"], "'--loss-scale': loss_scale cannot be 0.0"),
        (["replay", "sick.pth", "--max-trials", "-1"], "'--max-trials': max_trials cannot be -1"),
        (["replay", "sick.pth", "--time", "nan"], "'--time': time cannot be nan"),
        (["replay", "sick.pth", "--device", "gpu"], "'--device': device cannot be 'gpu'. It is cpu, cuda or cuda:N"),
        (["plot", "sick.pth", "--max-trials", "1"], "No such option '--max-trials'"),
        (["fix", "sick.pth", "--diff", "--write"], "--diff goes with neither --write nor --json"),
        (["fix", "sick.pth", "--diff", "--json"], "--diff goes with neither --write nor --json"),
        (["fix", "sick.pth", "--no-fixes"], "No such option '--no-fixes'"),
        (["repro", "sick.pth", "-o", "nowhere/repro.py"], "There is no folder nowhere"),
        (["replay", *WELL, "--model-arg", "width"], "'width' is not K=V"),
        (
            ["replay", *SICK, "-o", "report.txt"],
            "report.txt: unknown ending; use .html, .md, .json, .png, .svg or .pdf",
        ),
        (["replay", *SICK, "-o", "nowhere/report.json"], "There is no folder nowhere"),
        (["plot", *SICK, "-o", "ranges"], "ranges: unknown ending"),
        (["plot", *SICK, "-o", "ranges.html"], "ranges.html: unknown ending; use .png, .svg or .pdf"),
        (["triage", "sick.pth", "--scheduler", "tcp://x:1", "--jobs", "2"], "--scheduler goes with no --jobs"),
        (["plto", "sick.pth"], "No such command 'plto'"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "nowhere.pth"], "nowhere.pth"),
        (["replay", "sik.pth"], "Check the path; a relative one starts here."),
        (["replay", "models_of_the_test.py"], "models_of_the_test.py"),
        (["inspect", "nowhere.pth"], "nowhere.pth"),
        (["replay", "sick.pth"], "not the model's code"),
        (
            ["replay", "sick.pth", "--model", "models_of_the_test.py"],
            "models_of_the_test.py defines healthy and broken.",
        ),
        (["replay", "sick.pth", "--model", "models_of_the_test.py:Net"], "_of_the_test.py defines healthy and broken."),
        (["replay", "sick.pth", "--model", "train.ipynb:Net"], "There is no file train.ipynb."),
        (["replay", "sick.pth", "--model", "modles_of_the_test.py:f"], "Did you mean models_of_the_test.py?"),
        (["replay", "sick.pth", "--model", "models_of_the_test.py:healthyy"], "Did you mean healthy?"),
        (["replay", "sick.pth", "--model", "models_of_the_test.py:broken"], "RuntimeError"),
        (["replay", "sick.pth", "--model", "models_of_the_test.py:healthy"], "do not fit Linear"),
        (["replay", *WELL, "--model-arg", "depth=3"], "unexpected keyword argument 'depth'"),
        (["replay", *WELL, "--model-arg", "depth=3"], """'cfg={"width": 16}'"""),
        (["replay", *WELL, "--model-arg", "width=5"], "weight (4, 4) for (5, 5)"),
        (["replay", *WELL, "--loss", "loss"], "does not say where to look"),
    ],
)
def test_an_error_is_one_message_and_what_to_do(arguments, message):
    result = run(*arguments)
    first, *rest = result.stderr.splitlines()
    assert result.exit_code == 1
    assert first.startswith("nandoctor: ")
    assert message in result.stderr
    assert rest
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_permission_to_read_is_not_a_matter_of_usage(monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # of root, everything can be read
    assert run("inspect", "well.pth").exit_code == 0


def test_a_check_that_cannot_tell_says_why_in_lines():
    result = run("replay", *WELL, "--model-arg", "width=5", "--check")
    assert result.exit_code == 125
    assert "tensors do):\n  2 of another shape" in result.stderr


def test_a_working_directory_that_is_gone_ends_in_a_message(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = run("verify", tmp_path / "dump.pth")
    told = result.stderr.splitlines()[0]
    assert (result.exit_code, told) == (125, "nandoctor: The working directory no longer exists.")
    monkeypatch.chdir(tmp_path)
