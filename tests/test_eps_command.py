"""`nandoctor eps`: numbers as tables and as JSON; and the audit that every report carries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import nandoctor
from nandoctor.cli import main

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "80")


def invoke(*arguments):
    return CliRunner().invoke(main, ["eps", *arguments])


def test_a_value_is_shown_in_every_format_on_one_screen():
    result = invoke("1e-8", "1e-5", "1e-3")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:3] == ["fp16", "0", "zero"]
    assert "0 (always)" in lines[1]


def test_a_value_as_json_has_no_infinity_in_it():
    data = json.loads(invoke("--json", "1000").stdout)
    assert data["schema"] == "nandoctor.eps/2"
    shown = {rounded["format"]: rounded for rounded in data["values"]}
    assert shown["float8_e4m3fn"]["effect"] == "overflow"
    assert shown["float8_e5m2"]["absorbed_from"] == 8192.0
    assert shown["float16"]["rounded"] == 1000.0


def test_values_alone_need_no_torch():
    script = "import sys; from nandoctor.cli import main; main(['eps', '1e-8'], standalone_mode=False)"
    script += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize("value", ["0", "nan", "inf"])
def test_what_is_no_eps_is_refused(value):
    result = invoke(value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not an eps" in result.stderr


def test_a_failing_backward_reports_the_eps_of_its_forward(tmp_path):
    class Edge(nn.Module):
        def __init__(self):
            super().__init__()
            self.eps = 1e-9
            self.enter = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return torch.sqrt(self.enter(x) ** 2 + self.eps)

    path = tmp_path / "dump.pth"
    torch.save({"state_dict": Edge().state_dict(), "x": torch.zeros(1, 2)}, path)
    report = nandoctor.replay(path, model=Edge, loss=lambda output, batch: output.sum(), fixes=False).report
    assert report.eps_audit[0].name == "eps"
    assert report.eps_audit[0].op == "add"


def test_an_optimizer_that_has_not_stepped_yet_shows_its_eps(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-7)
    path = tmp_path / "dump.pth"
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "x": torch.zeros(1, 2)}, path)
    report = nandoctor.replay(path, model=lambda: nn.Linear(2, 2), fixes=False).report
    assert [(use.place, use.value, use.effect) for use in report.eps_audit] == [("optimizer", 1e-7, None)]
