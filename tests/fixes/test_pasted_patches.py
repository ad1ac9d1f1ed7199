"""The text of a fix, pasted: `git apply` in a copy of the code, and the step run as any training script would."""

import linecache
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import nandoctor

pytestmark = pytest.mark.usefixtures("project")
HEAD = """import torch
from torch import nn


def make_square(scale):
    def square(v):
        return (v * v).mean(-1, keepdim=True) * scale

    return lambda v: square(v)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.lift.weight)
        self.lift.weight.data *= 400
        self.square = make_square(1.0)

    @property
    def gain(self):
        return (self.h * self.h).mean(-1, keepdim=True)

    def forward(self, x):
        h = self.h = self.lift(x)
"""
BODIES = {
    "two equal ops on a line": "return h / ((x * x).mean(-1, keepdim=True) + (h * h).mean(-1, keepdim=True)).sqrt()",
    "a statement of several lines": """spread = (
            (h * h)  # the power
            .mean(-1, keepdim=True)
        )
        return h / spread.sqrt()""",
    "a lambda": "power = lambda v: (v * v).mean(-1, keepdim=True)\n        return h / power(h).sqrt()",
    "a comprehension": "return h / sum((part * part).mean(-1, keepdim=True) for part in h.chunk(2, -1)).sqrt()",
    "a function in a closure": "return h / self.square(h).sqrt()",
    "a property": "return h / self.gain.sqrt()",
    "an assignment in place": "p = h.clone()\n        p *= h\n        return h / p.mean(-1, keepdim=True).sqrt()",
    "a number as a tensor": "p = torch.tensor(2e3) * h.half()\n        return p / p.abs().amax(-1, keepdim=True)",
    "one statement after another": "p = h * h; p = p.mean(-1, keepdim=True)\n        return h / p.sqrt()",
}
QUICK = ("two equal ops on a line", "a lambda", "a function in a closure", "an assignment in place")


def diagnose(body, file="net.py"):
    path = Path(file).absolute()
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{HEAD}        {body}\n")
    model = runpy.run_path(str(path))["Net"]()
    torch.save({"state_dict": model.state_dict(), "x": torch.randn(3, 8)}, "dump.pth")
    return nandoctor.replay("dump.pth", model=f"{path}:Net").report


def assert_mends(fix):
    """The step is well after `git apply`, in a copy of the folder that the diff is of."""
    copy = Path("copy")
    shutil.copytree(fix.patch_root, copy, ignore=shutil.ignore_patterns("copy", "__pycache__"))
    subprocess.run(["git", "apply", "-p1", "-"], input=fix.patch, text=True, cwd=copy, check=True)
    name = next(line[6:] for line in fix.patch.splitlines() if line.startswith("+++ b/"))
    model = runpy.run_path(str(copy / name))["Net"]()
    saved = torch.load("dump.pth")
    model.load_state_dict(saved["state_dict"])
    with nandoctor.cuda_autocast():
        output = model(saved["x"])
    output.square().mean().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    assert torch.allclose(output.float(), model(saved["x"]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "body",
    [pytest.param(body, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, body in BODIES.items()],
)
def test_a_source_fix_passes_when_it_is_pasted(body):
    report = diagnose(body)
    fix = next(item for item in report.fixes if item.verified and item.kind == "source")
    assert_mends(fix)
    assert all(check.status != "failed" for check in fix.checks)


def test_a_library_is_patched_below_site_packages():
    report = diagnose(BODIES["two equal ops on a line"], file="site-packages/lib.py")
    fix = next(item for item in report.fixes if item.verified and item.kind == "source")
    assert Path(fix.patch_root) == Path.cwd() / "site-packages"
    assert fix.patch.startswith("--- a/lib.py\n+++ b/lib.py\n")
    assert_mends(fix)


def test_a_fix_of_a_notebook_cell_is_a_diff_of_it():
    name, cell, space = "<ipython-input-3>", f"{HEAD}        {BODIES['a function in a closure']}\n", {}
    linecache.cache[name] = len(cell), None, cell.splitlines(keepends=True), name
    exec(compile(cell, name, "exec"), space)
    saved = {"state_dict": space["Net"]().state_dict(), "x": torch.randn(3, 8)}
    torch.save(saved, "dump.pth")
    fix = nandoctor.replay("dump.pth", model=space["Net"]).report.fixes[0]
    del linecache.cache[name]
    assert (fix.kind, fix.verified, "of <ipython-input-3>" in fix.title) == ("cell", True, True)
    Path(name).write_text(cell)
    subprocess.run(["git", "apply", "-p0"], input=fix.patch, text=True, check=True)
    fresh = {}
    exec(Path(name).read_text(), fresh)
    fresh["model"] = fresh["Net"]()
    fresh["model"].load_state_dict(saved["state_dict"])
    with nandoctor.cuda_autocast():
        output = fresh["model"](saved["x"])
    assert torch.allclose(output.float(), fresh["model"](saved["x"]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text(f"# new\n{path.read_text()}")])
def test_a_file_that_is_not_what_runs_gets_no_diff(change):
    """It is gone, or has changed since it was imported."""
    path = Path("frozen.py").absolute()
    path.write_text(f"{HEAD}        {BODIES['a property']}\n")
    net = runpy.run_path(str(path))["Net"]
    change(path)
    torch.save({"state_dict": net().state_dict(), "x": torch.randn(3, 8)}, "dump.pth")
    report = nandoctor.replay("dump.pth", model=net).report
    assert not any(item.kind == "source" for item in report.fixes)


def test_a_module_of_torch_is_kept_in_fp32_by_its_line():
    """What a person would merge: no snippet that patches the module."""
    body = "for _ in range(3):\n            h = self.lift(h) / 2\n        return h / h.abs().amax(-1, keepdim=True)"
    report = diagnose(body)
    fix = next(item for item in report.fixes if item.verified)
    assert fix.kind == "source"
    assert '+            with torch.autocast("cuda", enabled=False):\n' in fix.patch
    assert_mends(fix)
