"""What is written: no input and no foreign file is lost, and standard output has JSON alone or an exit code of 1."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from nandoctor.cli import main
from nandoctor.renderers.atomic_write import is_replaceable, write_text

MODEL = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        print("the model prints")
        super().__init__(3, 3)

    def forward(self, x):
        print("and prints")
        return super().forward(x)
"""
REPLAY = ["replay", "sick.pth", "--model", "train.py:Net", "--no-fixes"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(MODEL)
    x = torch.zeros(2, 3)
    x[1] = 3e5
    torch.save({"state_dict": torch.nn.Linear(3, 3).state_dict(), "x": x}, tmp_path / "sick.pth")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("train", None)


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_a_script_goes_into_a_py_file_alone(folder):
    before = Path("sick.pth").read_bytes()
    result = run("repro", "sick.pth", "--model", "train.py:Net", "-o", "sick.pth", "--force")
    assert (result.exit_code, Path("sick.pth").read_bytes()) == (2, before)
    assert "unknown ending; use .py." in result.stderr


@pytest.mark.parametrize("name", ["report.json", "report.html", "report.md", "ranges.png", "ranges.svg", "ranges.pdf"])
def test_a_file_of_somebody_else_stays(folder, name):
    Path(name).write_text("mine")
    result = run("replay", "-o", name, *REPLAY[1:])
    assert (result.exit_code, Path(name).read_text()) == (2, "mine")
    assert "did not write it: name another file, or add --force" in " ".join(result.stderr.split())
    assert run(*REPLAY, "-o", name, "--force").exit_code == 0
    assert run(*REPLAY, "-o", name).exit_code == 0  # it is nandoctor's own now
    assert is_replaceable(Path(name))


def test_a_plot_does_not_replace_what_it_is_drawn_from(folder):
    assert run(*REPLAY, "-o", "report.json").exit_code == 0
    shutil.copy("report.json", "ranges.png")
    Path("link.json").symlink_to("ranges.png")
    before = Path("ranges.png").read_bytes()
    result = run("plot", "-o", "ranges.png", "link.json", "--force")
    assert (result.exit_code, Path("ranges.png").read_bytes()) == (2, before)
    assert "is the file that is read" in result.stderr


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    write_text("nandoctor: old", "report.md")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    result = run(*REPLAY, "-o", "report.md")
    assert result.exit_code == 1
    assert "cannot be written to report.md: No space left on device" in result.stderr
    assert Path("report.md").read_text() == "nandoctor: old"
    assert not list(folder.glob(".nandoctor*"))


def test_what_a_model_prints_is_not_in_the_json(folder):
    result = run(*REPLAY, "--json")
    assert json.loads(result.stdout)["verdict"]
    assert "and prints" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("into", ["/dev/full", "a closed pipe"])
def test_an_output_that_takes_nothing_ends_in_1(folder, into):
    command = [sys.executable, "-m", "nandoctor", *REPLAY, "--json"]
    if into == "/dev/full":
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    else:
        script = f"{' '.join(command)} | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "option",
    [("--seed", "x"), ("--seed", "-1"), ("--seed", str(2**70)), ("--loss-scale", "nan"), ("--loss-scale", "0"),
     ("--loss-scale", "-2"), ("--loss-scale", "inf"), ("--time", "nan"), ("--time", "-1"), ("--max-trials", "-1")],
)  # fmt: skip
def test_an_impossible_number_is_wrong_usage(folder, option):
    assert run(*REPLAY, *option).exit_code == 2
