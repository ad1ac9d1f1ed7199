"""Names of modules and parameters may be a stranger's; in a snippet they are strings and nothing else."""

import ast

import pytest
import torch
from torch import nn

from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.evidence.edits import Together
from nandoctor.fixes.writing import ChangeWriter

NAMES = ['x"] + [open("canary", "w")]:#', "back\\slash", 'quote"', "line\nend", "\u202e\ud800", "blocks.0"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_in_a_snippet_is_a_string(name):
    edit = Together(edits=(KeepModule(module=name), KeepModule(module="other")))
    (written,) = ChangeWriter(nn.Identity(), None, ()).write(edit)
    (loop,) = (item for item in ast.parse(written.text).body if isinstance(item, ast.For))
    assert ast.literal_eval(loop.iter) == [name, "other"]


class LayerNorm(nn.Module):
    """Named as one of torch's, and held under the name of the op that its own code calls."""

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


def scaled(x):
    return x / x.norm(dim=-1, keepdim=True)


class Scale(nn.Module):
    def forward(self, x):
        return scaled(x)


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.norm = part()
        self.read = nn.Linear(4, 2)

    def forward(self, x):
        return self.read(self.norm(x))


@pytest.mark.parametrize("part", [LayerNorm, Scale])
def test_an_op_is_changed_in_a_module_of_its_name(replay, part):
    x = torch.ones(3, 4)
    x[1] = 0
    best = replay(Net(part), {"x": x}).fixes[0]
    assert best.workaround  # x / norm(x) has no limit at 0
    assert best.kind == "source"
