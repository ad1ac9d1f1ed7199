"""A module of the user's own code is kept in fp32 by a change of its forward, where that says all that is meant."""

import importlib.util
import subprocess

import pytest
import torch

import nandoctor
from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.evidence.formats import FP16, FP32
from nandoctor.evidence.trace import ModuleCall, TensorStats
from nandoctor.fixes.writing import ChangeWriter

NET = '''
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, scale=1.0, *rest, mask):  # gated
        """One value for each row.

        It stays as it is.
        """
        # the rows
        rows = self.inner(
            x * scale,  # scaled
        )
        if mask is not None:
            rows = rows * mask
        return rows.sum()
        # nothing follows


class Short(nn.Module):
    def forward(self, x): return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.left, self.right, self.short = Gate(), nn.ModuleList([Gate()]), Gate(), Short()

    def forward(self, x):
        return self.gate(x)
'''
CHANGED = '''
    def forward(self, x, scale=1.0, *rest, mask):  # gated
        """One value for each row.

        It stays as it is.
        """
        with torch.autocast("cuda", enabled=False):
            x = x.float()
            mask = mask.float()
            # the rows
            rows = self.inner(
                x * scale,  # scaled
            )
            if mask is not None:
                rows = rows * mask
            return rows.sum()
        # nothing follows
'''


def take(module, call=0, **formats):
    stats = (TensorStats(path=path, shape=(1,), dtype=low, numel=1, finite=True) for path, low in formats.items())
    return ModuleCall(module=module, type="Gate", call=call, depth=1, enter=0, leave=1, inputs=tuple(stats), outputs=())


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    spec = importlib.util.spec_from_file_location("net_of_gates", tmp_path / "net.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.Net()
    del net.left, net.right
    return net


def written(net, *calls, path="gate"):
    first = next(ChangeWriter(net, None, (), calls).write(KeepModule(module=path)))
    return first.change.files[0].after if first.kind == "source" else first.kind


def test_all_but_the_docstring_runs_outside_of_autocast(net):
    text = written(net, take("gate", **{"[0]": FP16, "[1]": FP32, "mask": FP16}))
    assert CHANGED in text
    assert text.startswith("\nimport torch\nfrom torch import nn\n")


@pytest.mark.parametrize(
    "calls",
    [
        [take("gate", **{"[0][1]": FP16})],  # in a list
        [take("gate", **{"[0]": FP16, "[2]": FP16})],  # one of `*rest`
        [take("gate", mask=FP16), take("gate", 1)],  # not each time
        [take("gate", **{"[0]": FP16, "[1]": FP16})],  # by a parameter that may be left out
    ],
)
def test_what_cannot_be_cast_by_its_name_is_cast_by_a_hook(net, calls):
    assert written(net, *calls) == "snippet"


def test_a_forward_is_left_alone_where_others_have_it_too(net, tmp_path):
    net.other = type(net.gate)()
    assert written(net, take("gate", **{"[0]": FP16})) == "snippet"
    del net.other
    assert written(net, take("short", **{"[0]": FP16}), path="short") == "snippet"  # a body on the line of its head
    net.other = type("Heir", (type(net.gate),), {"forward": lambda self, x: super(type(self), self).forward(x)})()
    assert written(net, take("gate", **{"[0]": FP16})) == "snippet"
    del net.other
    net.gate.forward = net.gate.forward
    assert written(net, take("gate", **{"[0]": FP16})) == "snippet"


def test_half_weights_and_library_modules_are_kept_by_a_hook(net):
    assert written(net, take("gate.inner", **{"[0]": FP16}), path="gate.inner") == "snippet"
    net.gate.inner.half()
    assert written(net, take("gate", **{"[0]": FP16})) == "snippet"


FAILING = """
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        energy = x.pow(2).sum(-1)
        mixed = self.mix(energy[:, None])[:, 0]
        return torch.softmax(mixed / 1e-5, -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.scores = nn.Linear(8, 8), Scores()

    def forward(self, x):
        return self.scores(self.lift(x))
"""


def test_an_own_block_that_needs_fp32_as_a_whole_is_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FAILING)
    torch.manual_seed(0)
    weights = {"lift.weight": torch.rand(8, 8), "lift.bias": torch.zeros(8)}
    weights |= {"scores.mix.weight": torch.full((1, 1, 3), 0.3), "scores.mix.bias": torch.zeros(1)}
    torch.save({"state_dict": weights, "x": 25 * torch.rand(4, 6, 8)}, "dump.pth")
    fix = nandoctor.replay("dump.pth", "net.py:Net").report.fixes[0]
    assert (fix.verified, fix.title, fix.kind) == (True, "Keep scores in fp32", "source")
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    assert "            x = x.float()\n            energy = " in (tmp_path / "net.py").read_text()
    assert nandoctor.replay("dump.pth", "net.py:Net", fixes=False).verdict == "healthy"
