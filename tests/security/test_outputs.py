"""What is written: no input and no foreign file is lost, and an answer that cannot be written is none."""

import errno
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run

from nandoctor.cli import main
from nandoctor.cli.verify import _verify_afresh
from nandoctor.views.save import is_replaceable

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
def folder(here, monkeypatch):
    (here / "train.py").write_text(MODEL)
    x = torch.zeros(2, 3)
    x[1] = 3e5
    torch.save({"state_dict": torch.nn.Linear(3, 3).state_dict(), "x": x}, here / "sick.pth")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield here
    sys.modules.pop("train", None)


def test_a_file_that_mentions_nandoctor_is_the_users(folder):
    Path("mine.py").write_text("import nandoctor\n")
    assert run("repro", "sick.pth", "--model", "train.py:Net", "-o", "mine.py").exit_code == 2
    assert Path("mine.py").read_text() == "import nandoctor\n"
    Path("notes.md").write_text("Found with nandoctor.\n")
    assert not is_replaceable(Path("notes.md"))


def test_a_script_goes_into_a_py_file_alone(folder):
    before = Path("sick.pth").read_bytes()
    result = run("repro", "sick.pth", "--model", "train.py:Net", "-o", "sick.pth")
    assert (result.exit_code, Path("sick.pth").read_bytes()) == (2, before)
    assert "unknown ending; use .py." in result.stderr


@pytest.mark.slow
def test_a_file_of_somebody_else_stays(folder):
    names = ["report.json", "report.html", "report.md", "ranges.png", "ranges.svg", "ranges.pdf"]
    for name in names:
        Path(name).write_text("mine")
        result = run("replay", "-o", name, *REPLAY[1:])
        assert (result.exit_code, Path(name).read_text()) == (2, "mine")
        assert "did not write it. Name another file, or remove it" in " ".join(result.stderr.split())
        Path(name).unlink()
    assert run(*REPLAY, *(word for name in names for word in ("-o", name))).exit_code == 0
    assert [name for name in names if not is_replaceable(Path(name))] == []


def test_a_plot_does_not_replace_the_dump_that_it_is_drawn_from(folder):
    Path("link.png").symlink_to("sick.pth")
    before = Path("sick.pth").read_bytes()
    result = run("plot", "-o", "link.png", *REPLAY[1:4])
    assert (result.exit_code, Path("sick.pth").read_bytes()) == (2, before)
    assert "Name another file" in " ".join(result.stderr.split())


VERBS = {
    "verify": (125, ["verify", *REPLAY[1:4]]),
    "verify --json": (125, ["verify", *REPLAY[1:4], "--json"]),
    "replay --check --json": (125, ["replay", *REPLAY[1:4], "--check", "--json"]),
    "replay": (1, REPLAY),
    "inspect": (1, ["inspect", "sick.pth"]),
    "explain": (1, ["explain"]),
    "--version": (1, ["--version"]),
    "replay --json": (1, [*REPLAY, "--json"]),
    "fix": (1, ["fix", *REPLAY[1:4]]),
    "repro": (1, ["repro", *REPLAY[1:4]]),
    "triage": (1, ["triage", *REPLAY[1:], "--jobs", "1"]),
}
QUICK = ("verify", "replay --check --json", "replay", "inspect", "--version")


def taking_nothing(into):
    """A text file for standard output that no byte can be written to."""
    if into == "/dev/full":
        return Path(into).open("w")
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


@pytest.mark.parametrize("into", ["/dev/full", "a closed pipe"])
@pytest.mark.parametrize("verb", [pytest.param(verb, marks=[pytest.mark.slow] * (verb not in QUICK)) for verb in VERBS])
def test_an_answer_that_nobody_gets_is_none(folder, monkeypatch, capsys, verb, into):
    code, arguments = VERBS[verb]
    output = taking_nothing(into)
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == (141 if code == 1 and into == "a closed pipe" else code)
    if into == "/dev/full":
        assert verb == "--version" or os.strerror(errno.ENOSPC) in capsys.readouterr().err
    else:
        assert "nandoctor" not in capsys.readouterr().err
    with suppress(OSError):
        output.close()


def test_an_error_that_nobody_reads_keeps_its_code(folder, monkeypatch):
    output = taking_nothing("/dev/full")
    monkeypatch.setattr(sys, "stderr", output)
    with pytest.raises(SystemExit) as ended:
        main(["verify", "sick.pth", "--model", "train.py:Nothing"])
    assert ended.value.code == 125
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "train.py"])
    assert ended.value.code == 1
    with suppress(OSError):
        output.close()


@pytest.mark.parametrize("arguments", [["explain"], ["--help"]])
def test_a_reader_that_left_hears_nothing(folder, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "nandoctor", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_name_of_a_file_is_obeyed_by_no_terminal(folder):
    name = "\x1b]8;;evil\x07x\x1b[2J\nb\u202e$(touch pwn)"
    Path(f"{name}.pth").write_text("nothing")
    shutil.copy("sick.pth", f"good{name}.pth")
    verbs = [["inspect", f"{name}.pth"], ["inspect", f"good{name}.pth"]]
    verbs += [["replay", f"good{name}.pth", *REPLAY[2:]], ["verify", f"good{name}.pth", *REPLAY[2:4]]]
    for arguments in verbs:
        result = run(*arguments)
        assert all(line.isprintable() for line in (result.stdout + result.stderr).split("\n")), arguments


def test_a_changed_project_is_verified_off_the_working_directory(monkeypatch):
    """`python -m` imports what lies in the working directory: a random.py that came with a dump."""
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or SimpleNamespace(stdout="{"))
    for first in ("/usr/bin", str(Path.cwd())):
        monkeypatch.setattr(sys, "path", [first, *sys.path])
        with suppress(AttributeError):  # there is no more of a process
            _verify_afresh(SimpleNamespace(arguments=["dump.pth"], runs=None), [])
    assert [command[1] for command in commands] == ["-P", "-m"]


@pytest.mark.parametrize(
    "verb",
    [["replay", "sick.pth", "-o"], ["plot", "sick.pth", "-o"], ["triage"], ["plot"], ["repro", "sick.pth", "-o"]],
)
def test_a_name_that_no_system_takes_is_one_line(folder, verb):
    ending = {"replay": ".json", "repro": ".py"}.get(verb[0], ".png")
    result = run(*verb, "n" * 5000 + ending)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0].endswith(f": {os.strerror(errno.ENAMETOOLONG)}.")
    assert len(result.stderr) < 500
