"""What a search calls verified is FIXED once it is written."""

import os
import subprocess

import pytest
import torch

import nandoctor
from nandoctor import cuda_autocast
from nandoctor.case import check

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"
MASKED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask):
        scores = self.q(x) @ x.transpose(-2, -1)
        scores = scores + (1.0 - mask[:, None, :].to(scores.dtype)) * -1e9
        return scores.softmax(-1) @ self.v(x)
"""
NORMED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x, mask):
        x = self.q(x) * mask[..., None].to(torch.float16)
        return x / (x.abs().amax(-1, keepdim=True) + 1e-9)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_step(project, code):
    """The file, and the dump of a batch of which the third sample is masked throughout."""
    (project / "net.py").write_text(HEAD + code)
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(HEAD + code, namespace)
    torch.manual_seed(0)
    mask = torch.ones(4, 5)
    mask[1, 3:], mask[2] = 0, 0
    model, x = namespace["Net"](), torch.randn(4, 5, 8)
    with cuda_autocast():
        output = model(x, mask).detach()
    assert not output.isfinite().all()
    torch.save({"state_dict": model.state_dict(), "x": x, "mask": mask, "output": output}, "dump.pth")


def write_fix(project, fix):
    """Apply the diff, and return the text of before."""
    before = (project / "net.py").read_text()
    subprocess.run(["git", "apply", "-p1"], input=fix.patch, text=True, check=True)
    return before


@pytest.mark.parametrize("code", [MASKED, pytest.param(NORMED, marks=pytest.mark.slow)])
def test_a_verified_fix_is_fixed_once_it_is_written(project, code):
    write_step(project, code)
    report = nandoctor.replay("dump.pth", "net.py:Net", max_trials=60).report
    written = [fix for fix in report.fixes if fix.kind == "source"]
    assert any(fix.verified for fix in written)
    runs = {"mode": "train" if report.runs.autocast.training else "eval", "seed": report.runs.autocast.seed}
    for fix in [fix for fix in written if fix.verified][:2]:
        before = write_fix(project, fix)
        told = [project / "net.py"]
        made, _ = check(nandoctor.load("dump.pth"), model="net.py:Net", changed=told, proved=True, **runs)
        (project / "net.py").write_text(before)
        assert made.outcome == "fixed", (fix.title, made.headline)


def test_an_edit_that_changes_the_meaning_is_not_called_fixed(project):
    write_step(project, NORMED)
    path = project / "net.py"
    path.write_text(path.read_text().replace("1e-9", "10.0"))
    os.utime(path, (path.stat().st_mtime + 1,) * 2)
    assert nandoctor.verify("dump.pth", "net.py:Net").outcome == "cannot-tell"
