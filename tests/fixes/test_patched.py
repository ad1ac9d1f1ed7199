"""A patch that is pasted does what the trial did: the step is run with it, without nandoctor's edits."""

import importlib.util

import pytest
import torch
from torch import nn

import nandoctor

MODULE = """import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        for layer in (self.a, self.b):
            layer.weight.data *= 3000
        self.c.weight.data *= 0.01

    def forward(self, x):
        h = x * 0.5
        {}


def make_model():
    return Net()
"""


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_model()


@pytest.mark.parametrize(
    "line",
    [
        "return self.norm(self.a(x) * self.b(x))",
        "return self.norm((self.a(x) * self.b(x)) / 1e3) + h",
        "return self.norm(self.a(h).square() * torch.rsqrt((self.a(x) * self.b(x)).mean() ** 2 + 1))",
        "return self.norm(\n            self.a(x)\n            * self.b(x)\n        )",
        "return {'y': self.norm(F.gelu(self.a(x)) * self.b(h)), 'h': h[:, 0 : 2 + 2]}",
    ],
)
def test_a_line_in_fp32(tmp_path, line):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    source = tmp_path / "sick.py"
    source.write_text(MODULE.format(line))
    torch.save({"state_dict": load(source).state_dict(), "x": x}, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", f"{source}:make_model").report
    cure = next(item for item in report.fixes if item.edit.kind == "keep-op")
    assert cure.verified

    healed = tmp_path / "healed.py"
    healed.write_text(MODULE.format(cure.patch.replace("\n", "\n        ")))
    assert _worst(load(source), x) is None
    assert _worst(load(healed), x) < 0.01


def _worst(model, x, *, exact=None):
    """The largest error beside fp32, as a share; None where anything is non-finite."""
    with torch.no_grad():
        exact = model(x) if exact is None else exact
        with nandoctor.cuda_autocast():
            made = model(x)
    made, exact = (value["y"] if isinstance(value, dict) else value for value in (made, exact))
    return float((made - exact).abs().max() / exact.abs().max()) if bool(made.isfinite().all()) else None


def _stack():
    torch.manual_seed(0)
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
    layers.layers[1].linear1.weight.data *= 2000
    layers.layers[1].linear2.weight.data *= 200
    return layers


def _pipe():
    torch.manual_seed(0)
    pipe = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    pipe[1].weight.data *= 1.5e5
    return pipe


def _half():
    return _pipe().half()


@pytest.mark.parametrize("make", [_stack, _pipe, _half], ids=["encoder", "sequential", "half"])
def test_a_module_that_torch_itself_calls(tmp_path, make):
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1), dtype=next(make().parameters()).dtype)
    torch.save({"state_dict": make().state_dict(), "x": x}, tmp_path / "dump.pth")
    cure = nandoctor.replay(tmp_path / "dump.pth", model=make).report.fixes[0]
    assert cure.verified
    assert cure.edit.kind == "keep-module"
    model = make()
    exec(cure.patch, {"torch": torch, "model": model})
    assert _worst(model, x, exact=make().float()(x.float()).detach()) < 0.01
