"""The user's code ends neither the process nor a run in silence, and its output is no part of a report."""

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import nandoctor
from nandoctor.engine.user_code import kept_running
from nandoctor.errors import LossError, ModelError

HEAD = "import os, sys\nimport torch\nfrom torch import nn\n\n"
NET = """
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        {line}
        return self.head(x)
"""


@pytest.fixture
def project(tmp_path):
    """A dump and a function that writes the text of its model file; it returns the SPEC of the model."""
    state = {"head.weight": torch.ones(4, 4), "head.bias": torch.ones(4)}
    torch.save({"state_dict": state, "x": torch.ones(2, 4)}, tmp_path / "dump.pth")

    def write(text):
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
        return f"{tmp_path / 'train.py'}:Net"

    return write


def replay(spec, **options):
    return nandoctor.replay(Path(spec).with_name("dump.pth"), model=spec, fixes=False, **options).report


@pytest.mark.parametrize("line", ["sys.exit('no device')", "os._exit(0)"])
def test_an_exit_of_the_model_is_an_error(project, line):
    with pytest.raises(ModelError, match=r"train\.py:12: the code ended the process"):
        replay(project(NET.format(line=line)))
    built = NET.format(line="pass").replace("super().__init__()", f"super().__init__(); {line}")
    with pytest.raises(ModelError, match="the code ended the process"):
        replay(project(built))


def test_an_exit_in_the_loss_is_an_error(project):
    spec = project(NET.format(line="pass") + "\n\ndef loss(output, batch):\n    os._exit(0)\n")
    with pytest.raises(LossError, match="the code ended the process"):
        replay(spec, loss=spec.replace(":Net", ":loss"))


def test_a_fork_of_the_code_may_exit():
    with kept_running():
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_files_of_the_training_are_kept(here):
    (here / "train.log").write_text("before")
    (here / ".cache").mkdir()
    with kept_running():
        (here / "train.log").write_text("after")
        Path("new.txt").open("x").close()
        torch.save({}, here.parent / "elsewhere.pth")
        np.save("array.npy", np.zeros(2))
        logging.FileHandler("run.log").close()
        (here / ".cache" / "made").write_text("kept")
        assert (here / "train.log").read_text() == "before"
        other = threading.Thread(target=lambda: (here / "by_another_thread").write_text("kept"))
        other.start()
        other.join()
    assert not (here.parent / "elsewhere.pth").exists()
    (here / "later.txt").write_text("later")
    names = {".cache", "train.log", "by_another_thread", "later.txt"}
    assert {path.name for path in here.iterdir()} == names
    assert (here / ".cache" / "made").read_text() == "kept"


ARGUMENTS = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    {net}
    args = parser.parse_args()
    WIDTH = 4
"""


def test_a_script_does_not_read_the_arguments_of_nandoctor(project, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nandoctor", "replay", "dump.pth", "--model", "train.py:Net"])
    arguments = sys.argv
    net = textwrap.indent(NET.format(line="pass"), "    ").strip()
    assert replay(project(ARGUMENTS.format(net=net))).verdict == "healthy"
    assert sys.argv is arguments


NOISE = """
print("printed"); os.write(1, b"written"); os.system("echo from a child")
import ctypes; ctypes.CDLL(None).puts(b"by C")
try:
    input()
except EOFError:
    pass
"""


@pytest.mark.slow
def test_noise_of_a_model_does_not_soil_json(project):
    spec = project(NET.format(line=textwrap.indent(NOISE, " " * 8).strip()))
    command = [sys.executable, "-m", "nandoctor", "replay", str(Path(spec).with_name("dump.pth")), "--model", spec]
    command += ["--json", "--no-fixes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, input="typed\n")
    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "healthy"
    assert all(word in done.stderr for word in ("printed", "written", "from a child", "by C"))


@pytest.mark.parametrize("passes_on", [False, True])
def test_a_model_without_a_forward_needs_a_call(project, passes_on):
    text = NET.format(line="pass").replace("forward", "training_step")
    if passes_on:  # as a LightningModule does
        text += "    def forward(self, *args, **kwargs):\n        return super().forward(*args, **kwargs)\n"
    with pytest.raises(ModelError, match="has no forward") as caught:
        replay(project(text))
    assert "--call FILE.py:NAME" in caught.value.remedy
