"""A project of a few lines whose step fails: its code, its dump, and the code with a fix applied."""

import runpy
import subprocess
import textwrap
from pathlib import Path

import torch

import nandoctor

NET = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        LAYERS

    def forward(self, INPUTS):
        FORWARD


def loss(output, batch):
    LOSS
"""


def eye(width=4, gain=1.0):
    """The code of a layer that gives `gain` times its input."""
    layer = f"self.lift = nn.Linear({width}, {width}, bias=False)"
    return f"{layer}\nnn.init.eye_(self.lift.weight).data.mul_({gain})"


EYE = eye()


class Project:
    """The working directory, with `net.py` and `dump.pth`; what is replayed is `Net`, and `loss` if one is written."""

    model, loss = "net.py:Net", None

    def write(self, forward, *, inputs="x", layers="self.lift = nn.Linear(4, 4)", loss=None):
        """Write the model's file, of the code of its parts."""
        parts = {"LAYERS": layers, "INPUTS": inputs, "FORWARD": forward, "LOSS": loss or "return output.mean()"}
        source = NET
        for name, code in parts.items():
            indent = "    " if name == "LOSS" else " " * 8
            source = source.replace(name, textwrap.indent(textwrap.dedent(code).strip(), indent).strip())
        self.write_file(source, loss=loss and "loss")

    def write_file(self, source, *, model="Net", loss=None):
        """Write a whole file, and name the model and the loss in it."""
        Path("net.py").write_text(source)
        self.model, self.loss = f"net.py:{model}", loss and f"net.py:{loss}"

    def build(self):
        """The model of the file as it is now."""
        return runpy.run_path("net.py")[self.model.partition(":")[2]]()

    def save(self, state=None, **arrays):
        """What a training script saves: the weights are those that the model is built with unless they are given."""
        torch.save({"state_dict": self.build().state_dict() if state is None else state, **arrays}, "dump.pth")

    def replay(self, **options):
        return nandoctor.replay("dump.pth", self.model, **{"loss": self.loss, **options}).report

    def apply(self, fix):
        subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)

    def verdict_with(self, fix):
        """The verdict on the step once the fix is applied to the file."""
        self.apply(fix)
        return self.replay(fixes=False).verdict


def added(fix):
    """The lines that the diff of a fix adds."""
    return [line[1:].strip() for line in fix.patch.splitlines()[2:] if line.startswith("+")]


def failures(fix):
    return [check.name for check in fix.checks if check.status == "failed"]
