"""Functions with a backward by hand are left as they were, scripts run as Python, and what refuses to run is told."""

import json
import subprocess
import sys

import pytest
import torch
from tiny_models import Returns
from torch import nn

from nandoctor.errors import ModelError
from nandoctor.tracing import dispatch_hook
from strangers.custom_functions import ZERO_ROW, Root, applied
from strangers.masks import BATCH, attends
from strangers.visits import Between, louder, mean, normal


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
    assert any(item["kind"] == "source" and item["workaround"] for item in report["fixes"])  # it has no limit at 0


def test_a_bound_that_torch_refuses_and_that_hides_nothing(examine):
    with pytest.raises(ModelError, match="without overflow") as caught:
        examine(attends(lambda scores, later: scores.clamp(min=-1e9)), BATCH)
    assert "torch.finfo(x.dtype)" in caught.value.remedy


def test_code_that_takes_half_alone_is_told_of_the_reference(examine):
    def kernel(x):
        if x.dtype is not torch.float16:
            raise TypeError("this kernel takes half")
        return x * 1e6

    with pytest.raises(ModelError, match=r"this kernel takes half \(in fp32, which nandoctor compares with\)"):
        examine(Between(Returns(kernel)), {"x": normal(3, 8)})
    assert examine(Between(Returns(lambda x: x * 1e6)), {"x": normal(3, 8)}).verdict == "precision"


def test_what_cannot_be_watched_is_said(examine):
    class Shy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = louder(nn.Linear(8, 8), 1e4)

        def forward(self, x):
            if dispatch_hook._handlers.stack:
                raise RuntimeError("somebody is watching")
            return self.inner(x * 30)

    report = examine(Between(Shy()), {"x": 10 * normal(5, 8)})
    assert report.first_nonfinite.place.module == "middle.inner"
    assert any("could not be traced (RuntimeError: somebody is watching)" in note for note in report.notes)
