"""Functions with a backward by hand are left as they were; scripts run as Python where a process begins so."""

import json
import subprocess
import sys

import pytest
import torch

from strangers.custom_functions import ZERO_ROW, Root, applied
from strangers.visits import mean


def test_other_nodes_of_the_function_are_left_alone(examine):
    kept = Root.apply(torch.full((3,), 4.0, requires_grad=True))
    before = type(kept.grad_fn)._forward_cls
    examine(applied(Root), ZERO_ROW, loss=mean)
    kept.sum().backward()
    assert type(kept.grad_fn)._forward_cls is before is Root
    assert "_forward_cls" not in vars(kept.grad_fn)


SCRIPT = """
import torch
from torch import nn

@torch.jit.script
def unit(x):
    return x / x.abs().max()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return unit(self.head(x) * 0)
"""


@pytest.mark.slow
def test_the_command_line_runs_scripts_as_python(tmp_path):
    """In a process of its own: torch reads when it is loaded whether scripts are compiled."""
    (tmp_path / "net.py").write_text(SCRIPT, encoding="utf-8")
    state = {"head.weight": torch.ones(4, 4), "head.bias": torch.ones(4)}
    torch.save({"state_dict": state, "x": torch.ones(2, 4)}, tmp_path / "dump.pth")
    command = [sys.executable, "-m", "nandoctor", "replay", "dump.pth", "--model", "net.py:Net", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    report = json.loads(done.stdout)
    source = report["origin"]["source"]
    assert (source["line"], source["column"], source["text"]) == (7, 11, "return x / x.abs().max()")
    assert any(item["kind"] == "source" and item["verified"] for item in report["fixes"])
