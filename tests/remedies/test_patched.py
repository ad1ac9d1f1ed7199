"""A patch that is pasted does what the trial did: the step is run with it, without nandoctor's edits."""

import importlib.util

import pytest
import torch

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
    cure = next(item for item in report.prescriptions if item.edit.kind == "keep-op")
    assert cure.verified

    healed = tmp_path / "healed.py"
    healed.write_text(MODULE.format(cure.patch.replace("\n", "\n        ")))
    assert _worst(load(source), x) is None
    assert _worst(load(healed), x) < 0.01


def _worst(model, x):
    """The largest error beside fp32, as a share; None where anything is non-finite."""
    with torch.no_grad():
        exact = model(x)
        with nandoctor.cuda_autocast():
            made = model(x)
    made, exact = (value["y"] if isinstance(value, dict) else value for value in (made, exact))
    return float((made - exact).abs().max() / exact.abs().max()) if bool(made.isfinite().all()) else None
